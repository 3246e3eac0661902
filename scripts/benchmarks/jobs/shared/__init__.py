"""What the jobs share: a rank of a job, arms, models, trainings."""
