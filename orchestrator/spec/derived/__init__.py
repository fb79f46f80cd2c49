"""What follows from a spec: functions of its fields."""
