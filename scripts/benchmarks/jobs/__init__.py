"""Programs that run under horovodrun: all arms and repetitions of a case in one job, one after the other."""
