"""What ptxas says of kernels, read: spills have to be seen where they are."""

from isojax.lowering import Resources, resources

SAID = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for one_mosaic_gpu_kernel
    16 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compiling entry function 'two_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for two_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 2 barriers
ptxas info    : Compiling entry function 'three' for 'sm_90a'
"""


def test_every_kernels_registers_and_spills_are_read():
    assert resources(SAID) == [
        Resources("one_mosaic_gpu_kernel", 168, 12, 24),
        Resources("two_mosaic_gpu_kernel", 18, 0, 0),
        Resources("three", -1, -1, -1),
    ]
    assert resources("") == []
