"""The bit-equality harness: gates that prove a region's claims, each with negative controls, and its benchmarks.

bits.py      comparison through integer views      case.py      operands of a gate
rowgate.py   a row's bits depend on the row alone  run.py       run a region's gates on one arch
accuracy.py  distance from float64                 bench.py     speed against a native peer and the floor
"""
