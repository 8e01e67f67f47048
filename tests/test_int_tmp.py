import sys, torch, pytest
from moe_infinity import MoE
INPUTS = {"input_ids": torch.tensor([[5, 6, 9]]), "attention_mask": torch.ones(1, 3).long()}
def interrupt_at(event, act):
    seen = 0
    def trace(frame, kind, arg):
        nonlocal seen
        if "/moe_infinity/" not in frame.f_code.co_filename: return None
        if kind == "line":
            seen += 1
            if seen == event:
                raise KeyboardInterrupt
        return trace
    before = sys.gettrace()
    sys.settrace(trace)
    try: act()
    except KeyboardInterrupt: pass
    finally: sys.settrace(before)
    return seen
def test_x(tiny_checkpoint):
    import time
    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        gen=lambda: moe.generate(**INPUTS, do_sample=False, max_new_tokens=2).tolist()
        exp=gen()
        t=time.time(); n=interrupt_at(-1, gen); print(n, time.time()-t)
    bad=[]
    for e in range(6,n,11):
        with MoE(tiny_checkpoint, host_memory="25%") as moe:
            def gen(): return moe.generate(**INPUTS, do_sample=False, max_new_tokens=2).tolist()
            gen()
            s=interrupt_at(e,gen)
            try:
                r=[gen()==exp for _ in range(3)]; moe.check_invariants()
                if not all(r): bad.append((e,"WRONG"))
            except BaseException as x: bad.append((e,repr(x)[:90]))
    print(len(bad), len(range(6,n,11))); print(*bad,sep="\n")
