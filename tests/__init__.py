"""The tests: ``unit`` pure, ``threads`` ranks as threads, ``conformance`` against NumPy, ``multiproc`` real jobs."""
