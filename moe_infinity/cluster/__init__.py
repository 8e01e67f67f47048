"""More than one machine: which replica gets a request, and experts on other hosts."""
