"""Parts of the cases: jobs are started, their blocks become rows and goals, these a table, JSON and a plot."""
