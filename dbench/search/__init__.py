"""The capacity search: the highest request rate that meets an SLA."""
