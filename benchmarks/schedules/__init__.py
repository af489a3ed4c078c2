"""What schedules reach beside the ideal, the simulation, and one another."""
