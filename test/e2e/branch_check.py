# Checks the invariants of branch_writers.py in the resident interpreter. The directory is in `where`.
import json, mmap, os, signal, sqlite3, time

problems = []
with open(os.path.join(where, "board"), "r+b") as f:
    see = memoryview(mmap.mmap(f.fileno(), 4096)).cast("Q")


def expect(ok, *what):
    if not ok:
        problems.append(" ".join(map(str, what)))


def read(name):
    with open(os.path.join(where, name)) as f:
        return f.read()


def tell(name, sig):
    os.kill(int(read(name + ".pid")), sig)


def until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return expect(False, "waited in vain for", what)
        time.sleep(0.005)


def stop(name):
    """Has a program stop itself and returns when it stands: it first finishes what it is in the middle of."""
    tell(name, signal.SIGUSR1)
    stat = "/proc/%d/stat" % int(read(name + ".pid"))
    until(lambda: open(stat).read().rpartition(")")[2].split()[0] == "T", "the end of what %s was doing" % name)


def check_memory():
    checks = see[6]
    tell("memory", signal.SIGUSR1)
    until(lambda: see[6] > checks, "the check of the pages")
    expect(see[7] == 0, see[7], "pages of another round")
    rounds = see[0]
    until(lambda: see[0] > rounds, "a round through the pages")
    expect(see[1] == 0, see[1], "pages were not of the round before")


def check_files():
    stop("files")
    n, lines = see[2], read("journal").split("\n")
    expect(lines.pop() == "", "the journal ends within a line")
    first, last = int(lines[0]), int(lines[-1])
    expect(lines == [str(i) for i in range(first, last + 1)] and first == max(1, last // 500 * 500), "the journal has gaps")
    expect(n <= last <= n + 1, n, "steps are done, the journal ends with", last)
    state = int(read("state"))
    expect(n <= state <= last, "the state is", state, "after", n, "steps and", last, "in the journal")
    names = [name for name in ("odd", "even") if os.path.exists(os.path.join(where, name))]
    expect(len(names) == 1, "of the pair of names there are", names)
    held = sorted(int(name) for name in os.listdir(os.path.join(where, "dir")))
    expect(held == list(range(held[0], held[-1] + 1)) and n <= held[-1] <= last and len(held) <= 21, "the directory holds", held, "after", n)
    for i in held[:-1]:
        expect(read("dir/%d" % i) == str(i) * 300, "dir/%d is not what was written" % i)


def check_database():
    stop("database")
    committed = see[3]
    db = sqlite3.connect(os.path.join(where, "db"), timeout=10)
    expect(db.execute("pragma journal_mode").fetchone()[0] == "wal", "the database is not in WAL mode")
    verdict = [row[0] for row in db.execute("pragma integrity_check")]
    expect(verdict == ["ok"], "integrity check:", verdict)
    count, most, total = db.execute("select count(*), max(id), sum(id) from rows").fetchone()
    expect(count == min(most, 500) and committed <= most <= committed + 1, committed, "rows were committed, there are", count, "up to", most)
    expect(db.execute("select sum from total").fetchone()[0] == total, "the sum is not that of the rows")
    db.close()


def check_echo():
    echoes = see[4]
    until(lambda: see[4] > echoes + 5, "echoes over the connection")
    expect(see[5] == 0, see[5], "wrong echoes")


os.setpriority(os.PRIO_PROCESS, 0, -15)  # the programs leave it little to work with
for check in check_files, check_database, check_memory, check_echo:
    try:
        check()
    except Exception as e:
        expect(False, check.__name__, repr(e))
for name in "files", "database":
    tell(name, signal.SIGCONT)
os.setpriority(os.PRIO_PROCESS, 0, 0)
print(json.dumps({"problems": problems, "numbers": list(see[:6])}))
