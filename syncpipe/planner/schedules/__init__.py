"""Plans under other schedules: several stages on a device, backward in halves, made to measure."""
