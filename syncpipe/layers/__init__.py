"""What can be a layer, and how a list of layers is placed on devices."""
