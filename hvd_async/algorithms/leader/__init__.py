"""Leader-pull: ranks train separately and are periodically pulled towards a leader or a center."""
