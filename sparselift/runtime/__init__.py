"""Runs a schedule on a live model: the prelude and the lifted forwards, pending gradients, and the fused update in optimizer.step()."""
