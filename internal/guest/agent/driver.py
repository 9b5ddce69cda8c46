# The resident interpreter of forkd's guest agent. Requests come on descriptor 3, answers go to descriptor 4, so nothing that is
# printed can be taken for an answer. The user's code lives in __main__; this code lives in a namespace of its own.
#
# Request: u32 length | kind | body.  Answer: u32 length | kind | flags | body.
import os, sys, signal, gc, select, linecache, traceback, random, _ast

RFD, WFD = 3, 4
FAILED, CUT, INERT = 1, 2, 4
FILE = (lambda: 0).__code__.co_filename
main = sys.modules['__main__'].__dict__
read, write = os.read, os.write
busy = False      # user code runs: an interrupt may be raised
forked = False    # this is a child of the interpreter
count = 0
SECRETS = '/run/forkd/secrets/'
told = False      # the secrets of this sandbox are in os.environ
generators = []   # numpy generators that were seeded by the system and live in the snapshot
SIG_IDENTITY = signal.SIGRTMAX - 3


def receive():
    b = read(RFD, 65536)
    if not b:
        os._exit(0)
    while len(b) < 4 or len(b) < 4 + int.from_bytes(b[:4], 'little'):
        more = read(RFD, 1 << 20)
        if not more:
            os._exit(0)
        b += more
    return b


def answer(kind, flags, body):
    b = (len(body) + 2).to_bytes(4, 'little') + bytes((kind, flags)) + body
    while b:
        b = b[write(WFD, b):]


def flush():
    for f in (sys.stdout, sys.stderr):
        try:
            f.flush()
        except Exception:
            pass


def cut(text, limit, tail=False):
    b = text.encode('utf-8', 'backslashreplace')
    if len(b) <= limit:
        return b, 0
    b = b[-limit:] if tail else b[:limit]
    return b.decode('utf-8', 'ignore').encode('utf-8'), CUT


def trace(e):
    try:
        te = traceback.TracebackException(type(e), e, e.__traceback__)
        seen = set()
        todo = [te]
        while todo:
            t = todo.pop()
            if t is None or id(t) in seen:
                continue
            seen.add(id(t))
            t.stack = traceback.StackSummary.from_list([f for f in t.stack if f.filename != FILE])
            todo += [t.__cause__, t.__context__]
            todo += getattr(t, 'exceptions', None) or []
        return ''.join(te.format())
    except BaseException:
        return type(e).__name__ + ' (its traceback can not be shown)\n'


def expression(code, name):
    # The common case: one expression, and no syntax tree.
    try:
        return compile(code, name, 'eval', 0, True)
    except SyntaxError:
        return None


def run(code, name):
    if code[:1] in ' \t\n':
        import textwrap
        code = textwrap.dedent(code)
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    linecache.cache.pop('<eval-%d>' % (count - 256), None)
    last = expression(code, name)
    if last is None:
        tree = compile(code, name, 'exec', _ast.PyCF_ONLY_AST, True)
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = compile(_ast.Expression(tree.body.pop().value), name, 'eval', 0, True)
        exec(compile(tree, name, 'exec', 0, True), main)
        if last is None:
            return ''
    value = eval(last, main)
    return '' if value is None else repr(value)


def evaluate(code, limit):
    global busy, count
    count += 1
    if not told and os.access(SECRETS + '.env', 0):
        take_secrets()
    flags, error, result = 0, None, ''
    try:
        busy = True
        try:
            result = run(code.decode('utf-8'), '<eval-%d>' % count)
        finally:
            busy = False
    except BaseException as e:
        flags, error = FAILED, trace(e)
        if forked:
            end_child(e, error)
    if forked:
        end_child(None, '')
    flush()
    text, truncated = cut(result if error is None else error, limit, error is not None)
    return flags | truncated, text


def take_secrets():
    # A sandbox is given them after its identity. That they are to be in environments is what the file .env says.
    global told
    told = True
    for name in os.listdir(SECRETS):
        if name[0] != '.':
            with open(SECRETS + name, 'rb') as f:
                os.environb[name.encode()] = f.read()


def end_child(e, error):
    # The user's code called os.fork and its child came back from it: it must not go on as a second interpreter.
    status = 0
    if isinstance(e, SystemExit):
        status = e.code if isinstance(e.code, int) else (0 if e.code is None else 1)
    elif e is not None:
        status = 1
        try:
            sys.stderr.write(error)
        except Exception:
            pass
    flush()
    os._exit(status & 0xff)


def after_fork():
    global forked
    forked = True
    for fd in (RFD, WFD):
        try:
            os.close(fd)
        except OSError:
            pass


def words(seed):
    return [int.from_bytes(seed[i:i + 4], 'little') for i in range(0, len(seed), 4)]


def reseed(seed):
    # uuid4, secrets and os.urandom ask the kernel, which the agent has reseeded already.
    modules = sys.modules
    random.seed(seed + b'random')
    if '_ssl' in modules:
        # Reseeds OpenSSL's primary generator from the kernel, with these bytes on top; the generators of the threads notice
        # that their parent was reseeded and do the same before their next output.
        modules['_ssl'].RAND_add(seed + b'openssl', float(len(seed)))
    if 'tempfile' in modules:
        modules['tempfile']._name_sequence = None
    if 'uuid' in modules:
        modules['uuid']._node = modules['uuid']._last_timestamp = None
    if 'numpy.random' in modules:
        reseed_numpy(modules['numpy.random'], seed)
    if 'torch' in modules:
        modules['torch'].manual_seed(int.from_bytes(seed[:8], 'little') & (1 << 63) - 1)


def reseed_numpy(nr, seed):
    # The whole state of the Mersenne twister: seed() would hash a shorter one through half of numpy, which is slow the first time.
    try:
        nr.set_state(('MT19937', memoryview(os.urandom(2496)).cast('I'), 624, 0, 0.0))
    except ValueError:
        # Another generator was put in its place.
        nr.set_bit_generator(type(nr.get_bit_generator())(nr.SeedSequence(words(seed))))
    if generators:
        seq = nr.SeedSequence(words(seed))
        for bits in generators:
            bits.state = type(bits)(seq.spawn(1)[0]).state


def identify(body):
    n = int.from_bytes(body[:4], 'little')
    seed = body[4:4 + n]
    for kv in os.fsdecode(body[4 + n:]).split('\0'):
        k, sep, v = kv.partition('=')
        if sep:
            os.environ[k] = v
        elif k:
            os.environ.pop(k, None)   # an earlier identity set it
    reseed(seed)


def quiesce():
    modules = sys.modules
    if '_ssl' not in modules and openssl_mapped():
        # Something else in this process uses OpenSSL: its generator is reached through the same library.
        try:
            import _ssl
        except ImportError:
            pass
    # What gc.freeze hid from an earlier search is kept from then, as long as anything but this list and this loop uses it.
    generators[:] = [bits for bits in generators if sys.getrefcount(bits) > 3]
    if 'numpy.random' in modules:
        nr = modules['numpy.random']
        own = nr.mtrand._rand._bit_generator   # reseed_numpy does that one in another way
        for o in gc.get_objects():
            if isinstance(o, nr.BitGenerator) and o is not own:
                keep_generator(o)
    gc.collect()
    gc.freeze()   # the collector leaves what is alive now alone: its pages stay shared between forks


def inert():
    # Nothing in this process can run before the next request comes: it has one thread, and no signal runs Python code but our own.
    try:
        if len(os.listdir('/proc/self/task')) != 1:
            return False
        ours = (None, signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, on_interrupt, on_identity)
        return all(signal.getsignal(s) in ours for s in signal.valid_signals())
    except Exception:
        return False


def keep_generator(bits):
    seq = getattr(bits, 'seed_seq', None) or getattr(bits, '_seed_seq', None)
    entropy = getattr(seq, 'entropy', None)
    # A seed that someone chose is small and stays; one that came from the system has 128 bits.
    if isinstance(entropy, int) and entropy >> 64 and not any(bits is b for b in generators):
        generators.append(bits)


def openssl_mapped():
    try:
        with open('/proc/self/maps') as f:
            return 'libcrypto' in f.read()
    except OSError:
        return False


def serve(b):
    kind, body = b[4], b[5:]
    if kind == 69:  # E
        flags, text = evaluate(body[4:], int.from_bytes(body[:4], 'little'))
        answer(kind, flags, text)
        return
    flags = 0
    try:
        if kind == 73:  # I
            identify(body)
        elif kind == 81:  # Q
            quiesce()
            flags = INERT if inert() else 0
        answer(kind, flags, b'')
    except BaseException as e:
        answer(kind, FAILED, cut(trace(e) or type(e).__name__, 4096, True)[0])


def on_interrupt(sig, frame):
    if busy:
        raise KeyboardInterrupt


def on_identity(sig, frame):
    # An identity that comes while user code runs: a fork of a machine that was in the middle of an evaluation.
    if not busy or forked:
        return
    if select.select([RFD], [], [], 0)[0]:
        b = receive()
        if b[4] == 73:
            serve(b)


def start():
    os.set_inheritable(RFD, False)
    os.set_inheritable(WFD, False)
    os.register_at_fork(after_in_child=after_fork)
    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(SIG_IDENTITY, on_identity)
    sys.argv[:] = ['']
    for f in (sys.stdout, sys.stderr):
        f.reconfigure(encoding='utf-8', errors='backslashreplace', line_buffering=True)
    answer(82, 0, b'')
    while True:
        serve(receive())


start()
