"""Tells from the trace of a run who makes whom wait, and by simulation what each mode would bring."""
