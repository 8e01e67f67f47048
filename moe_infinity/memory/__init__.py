"""Where bytes live and how they move: checkpoint files, slots, and the one object that copies."""
