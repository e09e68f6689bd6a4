"""Sources of pictures and of measurements, from which stores are built: one file for each kind."""
