"""`isojax bench trainer`: a policy step of a stock Megatron and of ours, same weights, tokens and optimizer."""
