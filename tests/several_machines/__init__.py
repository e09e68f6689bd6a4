"""The commands for several machines, run on two network namespaces of one machine: ``make several-machines``."""
