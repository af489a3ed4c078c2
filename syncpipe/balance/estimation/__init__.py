"""What layers would cost on a device that is not here, from its data sheet."""
