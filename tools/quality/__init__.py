"""What settings cost in right answers and bring in speed: measured, tabled, drawn."""
