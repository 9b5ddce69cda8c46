package agentproto

// AppendTo appends the message's binary form.
func (m *Hello) AppendTo(dst []byte) []byte {
	dst = append(dst, m.Token[:]...)
	return append(dst, byte(m.Version), byte(m.Version>>8))
}

// Decode reads the message's binary form.
func (m *Hello) Decode(b []byte) error {
	c := cursor{b: b}
	copy(m.Token[:], c.take(uint32(len(m.Token))))
	m.Version = c.u16()
	return c.err()
}

// AppendTo appends the message's binary form.
func (m *Identity) AppendTo(dst []byte) []byte {
	dst = appendString(dst, m.InstanceID)
	dst = appendString(dst, m.Hostname)
	dst = appendString(dst, m.MachineID)
	dst = append64(dst, uint64(m.UnixNano))
	dst = appendBytes(dst, m.Entropy)
	dst = appendStrings(dst, m.Env)
	return appendBool(dst, m.RunHooks)
}

// Decode reads the message's binary form.
func (m *Identity) Decode(b []byte) error {
	c := cursor{b: b}
	m.InstanceID = c.string()
	m.Hostname = c.string()
	m.MachineID = c.string()
	m.UnixNano = c.i64()
	m.Entropy = c.bytes()
	m.Env = c.strings()
	m.RunHooks = c.bool()
	return c.err()
}

// AppendTo appends the message's binary form.
func (m *IdentityAck) AppendTo(dst []byte) []byte {
	dst = append64(dst, uint64(m.UnixNano))
	dst = append32(dst, m.Hooks)
	return appendBool(dst, m.Python)
}

// Decode reads the message's binary form.
func (m *IdentityAck) Decode(b []byte) error {
	c := cursor{b: b}
	m.UnixNano = c.i64()
	m.Hooks = c.u32()
	m.Python = c.bool()
	return c.err()
}

// AppendTo appends the message's binary form.
func (m *Pong) AppendTo(dst []byte) []byte {
	dst = append64(dst, uint64(m.UnixNano))
	dst = append64(dst, uint64(m.UptimeNano))
	dst = append32(dst, m.PID)
	dst = appendString(dst, m.Version)
	return appendBool(dst, m.Python)
}

// Decode reads the message's binary form.
func (m *Pong) Decode(b []byte) error {
	c := cursor{b: b}
	m.UnixNano = c.i64()
	m.UptimeNano = c.i64()
	m.PID = c.u32()
	m.Version = c.string()
	m.Python = c.bool()
	return c.err()
}

// AppendTo appends the message's binary form.
func (m *ExecRequest) AppendTo(dst []byte) []byte {
	dst = appendStrings(dst, m.Args)
	dst = appendStrings(dst, m.Env)
	dst = appendString(dst, m.Cwd)
	dst = appendString(dst, m.User)
	dst = append32(dst, m.TimeoutMS)
	dst = append32(dst, m.MaxOutput)
	return appendBytes(dst, m.Stdin)
}

// Decode reads the message's binary form.
func (m *ExecRequest) Decode(b []byte) error {
	c := cursor{b: b}
	m.Args = c.strings()
	m.Env = c.strings()
	m.Cwd = c.string()
	m.User = c.string()
	m.TimeoutMS = c.u32()
	m.MaxOutput = c.u32()
	m.Stdin = c.bytes()
	return c.err()
}

// AppendTo appends the message's binary form.
func (m *ExecResult) AppendTo(dst []byte) []byte {
	dst = appendBytes(dst, m.Stdout)
	dst = appendBytes(dst, m.Stderr)
	dst = append32(dst, uint32(m.ExitCode))
	dst = appendString(dst, m.Signal)
	dst = appendBool(dst, m.TimedOut)
	dst = appendBool(dst, m.Truncated)
	return appendShortage(dst, m.OOMKilled, m.DiskFull)
}

// Decode reads the message's binary form.
func (m *ExecResult) Decode(b []byte) error {
	c := cursor{b: b}
	m.Stdout = c.bytes()
	m.Stderr = c.bytes()
	m.ExitCode = int32(c.u32())
	m.Signal = c.string()
	m.TimedOut = c.bool()
	m.Truncated = c.bool()
	m.OOMKilled, m.DiskFull = c.shortage()
	return c.err()
}

// AppendTo appends the message's binary form.
func (m *EvalRequest) AppendTo(dst []byte) []byte {
	dst = appendString(dst, m.Code)
	dst = append32(dst, m.TimeoutMS)
	return append32(dst, m.MaxOutput)
}

// Decode reads the message's binary form.
func (m *EvalRequest) Decode(b []byte) error {
	c := cursor{b: b}
	m.Code = c.string()
	m.TimeoutMS = c.u32()
	m.MaxOutput = c.u32()
	return c.err()
}

// AppendTo appends the message's binary form.
func (m *EvalResult) AppendTo(dst []byte) []byte {
	dst = appendString(dst, m.Result)
	dst = appendBytes(dst, m.Stdout)
	dst = appendBytes(dst, m.Stderr)
	dst = appendString(dst, m.Error)
	dst = appendBool(dst, m.TimedOut)
	dst = appendBool(dst, m.Truncated)
	return appendShortage(dst, m.OOMKilled, m.DiskFull)
}

// Decode reads the message's binary form.
func (m *EvalResult) Decode(b []byte) error {
	c := cursor{b: b}
	m.Result = c.string()
	m.Stdout = c.bytes()
	m.Stderr = c.bytes()
	m.Error = c.string()
	m.TimedOut = c.bool()
	m.Truncated = c.bool()
	m.OOMKilled, m.DiskFull = c.shortage()
	return c.err()
}

// What a result says of shortages is a byte that agents of version 1 did not send.
const (
	shortOfMemory = 1 << iota
	shortOfDisk
)

func appendShortage(dst []byte, memory, disk bool) []byte {
	var b byte
	if memory {
		b |= shortOfMemory
	}
	if disk {
		b |= shortOfDisk
	}
	return append(dst, b)
}

func (c *cursor) shortage() (memory, disk bool) {
	if c.bad || len(c.b) == 0 {
		return false, false
	}
	b := c.u8()
	return b&shortOfMemory != 0, b&shortOfDisk != 0
}

// AppendTo appends the message's binary form.
func (m *Notice) AppendTo(dst []byte) []byte {
	dst = append32(dst, m.OOMKills)
	dst = appendString(dst, m.Victim)
	dst = appendBool(dst, m.DiskFull)
	dst = append64(dst, m.DiskFree)
	return append64(dst, m.DiskSize)
}

// Decode reads the message's binary form.
func (m *Notice) Decode(b []byte) error {
	c := cursor{b: b}
	m.OOMKills = c.u32()
	m.Victim = c.string()
	m.DiskFull = c.bool()
	m.DiskFree = uint64(c.i64())
	m.DiskSize = uint64(c.i64())
	return c.err()
}

// AppendTo appends the message's binary form.
func (e *Error) AppendTo(dst []byte) []byte {
	return appendString(appendString(dst, string(e.Code)), e.Message)
}

// Decode reads the message's binary form.
func (e *Error) Decode(b []byte) error {
	c := cursor{b: b}
	e.Code = Code(c.string())
	e.Message = c.string()
	return c.err()
}
