# Rewrites pages at a steady rate without ever sleeping, and keeps the gaps between two looks at the clock that are long enough to be seen.
# Arguments: MiB to rewrite, MiB a second (0: as fast as it can), the directory to work in. On SIGTERM it writes what it saw and ends.
import json, mmap, os, signal, sys, time

PAGE, FLOOR_NS, SLACK_NS = 4096, 300_000, 20_000_000
size, rate, where = int(sys.argv[1]) << 20, int(sys.argv[2]) << 20, sys.argv[3]
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
step = PAGE * 10**9 // rate if rate else 0
state = {"stop": False}
signal.signal(signal.SIGTERM, lambda *_: state.update(stop=True))
gaps, pages, rounds = [], 0, 0


def write_round(last, due):
    global pages
    block = rounds.to_bytes(8, "little") * (PAGE // 8)
    now = time.monotonic_ns
    for at in range(0, size, PAGE):
        area[at:at + PAGE] = block
        while True:
            t = now()
            if t - last > FLOOR_NS:
                gaps.append((time.time_ns(), t - last))
            last = t
            if t >= due:
                break
        due = max(due + step, t - SLACK_NS)
        pages += 1
        if state["stop"]:
            break
    return last, due


def put(name, text):
    path = os.path.join(where, name)
    with open(path + ".new", "w") as f:
        f.write(text)
    os.rename(path + ".new", path)


last = due = begin = time.monotonic_ns()
while not state["stop"]:
    rounds += 1
    last, due = write_round(last, due)
    if rounds == 1:
        put("ready", "")
        gaps.clear()
        last = due = begin = time.monotonic_ns()
        pages = 0
put("result", json.dumps({"seconds": (last - begin) / 1e9, "bytes": pages * PAGE, "rounds": rounds, "gaps": gaps[-150000:]}))
