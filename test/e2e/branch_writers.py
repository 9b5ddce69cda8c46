# Programs that keep invariants at full speed while their machine is branched. Argument: the directory to work in.
import mmap, os, random, signal, socket, sqlite3, sys, threading, time

where = sys.argv[1]
PAGES = 4096
KEPT = 500  # lines of the journal, rows of the database
os.makedirs(where, exist_ok=True)


def board():
    """Numbers that all see: 0 rounds, 1 bad pages, 2 steps of the files, 3 committed rows, 4 echoes, 5 wrong echoes, 6 checks, 7 bad pages found by them."""
    f = open(os.path.join(where, "board"), "r+b")
    return memoryview(mmap.mmap(f.fileno(), 4096)).cast("Q")


def memory(see):
    """Rewrites pages from the first to the last: behind the place it is at they are of this round, before it of the round before."""
    area = memoryview(mmap.mmap(-1, PAGES * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).cast("Q")
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    words = [page * 512 + page % 512 for page in range(PAGES)]  # another word in each page
    while True:
        last = see[0]
        for i, at in enumerate(words):
            if area[at] != last:
                see[1] += 1
            area[at] = last + 1
            if asked:
                asked.clear()
                see[7] += sum(area[w] != last + 1 for w in words[:i + 1]) + sum(area[w] != last for w in words[i + 1:])
                see[6] += 1
        see[0] = last + 1


def put(name, data, append=False):
    fd = os.open(os.path.join(where, name), os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC))
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)


def files(see):
    """A journal, then a file that is replaced, then a pair of names of which there is always one, then one file more or less in a directory."""
    os.makedirs(os.path.join(where, "dir"), exist_ok=True)
    put("odd", b"")
    put("state", b"0")
    n = 0
    while True:
        n += 1
        if n % KEPT == 0:  # it must not grow for as long as the machine runs
            put("journal.new", b"%d\n" % n)
            os.rename(os.path.join(where, "journal.new"), os.path.join(where, "journal"))
        else:
            put("journal", b"%d\n" % n, append=True)
        put("state.new", b"%d" % n)
        os.rename(os.path.join(where, "state.new"), os.path.join(where, "state"))
        a, b = ("odd", "even") if n % 2 else ("even", "odd")
        os.rename(os.path.join(where, a), os.path.join(where, b))
        put("dir/%d" % n, b"%d" % n * 300)
        if n > 20:
            os.unlink(os.path.join(where, "dir/%d" % (n - 20)))
        see[2] = n


def database(see):
    """Commits a row and drops an old one; the sum of those that are there is kept in another table of the same transaction."""
    db = sqlite3.connect(os.path.join(where, "db"), isolation_level=None)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    db.execute("create table rows (id integer primary key, filler blob)")
    db.execute("create table total (sum integer)")
    db.execute("insert into total values (0)")
    n = 0
    while True:
        n += 1
        db.execute("begin immediate")
        db.execute("insert into rows values (?, ?)", (n, random.randbytes(300)))
        db.execute("delete from rows where id = ?", (n - KEPT,))
        db.execute("update total set sum = sum + ?", (n - max(n - KEPT, 0),))
        db.execute("commit")
        see[3] = n


def echo(see):
    """Numbers that go back and forth over one connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        conn, _ = server.accept()
        while data := conn.recv(4096):
            conn.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    conn = socket.create_connection(server.getsockname())
    n = 0
    while True:
        n += 1
        word = n.to_bytes(8, "little") * 64
        conn.sendall(word)
        got = b""
        while len(got) < len(word):
            got += conn.recv(4096) or sys.exit("the connection was closed")
        see[5] += got != word
        see[4] = n


def stand(*_):
    """Stops between two calls: whoever is stopped within one may hold a lock that SQLite's readers need."""
    os.kill(os.getpid(), signal.SIGSTOP)


with open(os.path.join(where, "board"), "wb") as f:
    f.write(bytes(4096))
for program in memory, files, database, echo:
    if os.fork() == 0:
        if program in (files, database):
            signal.signal(signal.SIGUSR1, stand)
        put(program.__name__ + ".pid", b"%d" % os.getpid())
        program(board())
see = board()
while min(see[0], see[2], see[3], see[4]) < 3:
    time.sleep(0.01)
put("ready", b"")
signal.pause()
