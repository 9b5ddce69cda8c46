# What a test of the snapshot graph keeps in a guest, in the resident interpreter: pages of memory, files, and what was done in order.
import hashlib, mmap, os, zlib

PAGES = 2048
area = mmap.mmap(-1, PAGES * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
done = []
where = "/root/graph"
os.makedirs(where, exist_ok=True)


def filling(word):
    return hashlib.sha256(word.encode()).digest()


def change(mark, runs, files):
    """Fills runs of pages, [[first, count], …], and writes files, or removes those of no size."""
    for first, count in runs:
        for page in range(first, first + count):
            area[page * 4096:(page + 1) * 4096] = filling("%s %d" % (mark, page)) * 128
    for name, size in files.items():
        path = os.path.join(where, name)
        if not size:
            os.unlink(path)
            continue
        with open(path + ".new", "wb") as f:
            f.write((filling(mark + name) * (size // 32 + 1))[:size])
            os.fsync(f.fileno())
        os.rename(path + ".new", path)
    done.append(mark)


def found():
    view, files = memoryview(area), {}
    for name in os.listdir(where):
        with open(os.path.join(where, name), "rb") as f:
            files[name] = hashlib.sha256(f.read()).hexdigest()
    return {"pages": [zlib.crc32(view[at:at + 4096]) for at in range(0, len(area), 4096)], "files": files, "done": done}
