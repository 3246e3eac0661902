"""Parts of the jobs: a rank, arms, models, trainings."""
