"""The benchmark: ours against peers, checked first, in interleaved rounds."""
