"""Which experts have a slot and which one leaves. No torch: the engine and the simulator run this
same code.
"""
