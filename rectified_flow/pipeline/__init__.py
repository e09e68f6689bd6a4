"""A trained flow as a pipeline of diffusers."""
