"""Leader-pull: ranks train alone and are pulled towards a leader or a center now and then."""
