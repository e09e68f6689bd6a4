"""How a program starts and ends on one process or several, and what these do together."""
