"""What the kernels take for granted of the GPU; speed follows from it, bits never."""

SMS = 132  # streaming multiprocessors of an H100 SXM or H200; a part with fewer just takes more waves
