// Package agentproto is what the guest agent (internal/guest/agent) and the host (internal/guest/agentclient) have in common: the
// messages of the control channel, their binary form, and the frames that carry them.
//
// It is not a transport and keeps no state of a conversation: who connects, who waits and who gives up is decided on each side.
//
// # Frames
//
// A frame is a header of HeaderSize bytes, at most MaxPayload bytes of payload and a trailer of TrailerSize bytes. A longer message is
// several frames of the same kind and id, all but the last with the flag "more". Integers are little endian.
//
//	0  4  magic          8   8  session
//	4  1  kind           16  4  id
//	5  1  flags          20  4  payload length
//	6  2  zero           24     payload, then the trailer's 4 bytes
//
// # Sessions
//
// The first frame on a connection is HELLO with a random token; its session number is made of the token and stands in every later
// frame of both sides. The host ignores every byte until HELLO_ACK with its own token, so an answer to an earlier host, whole or cut,
// never reaches a later one. A reader that meets a bad header or trailer ignores every byte until the next HELLO. A host that takes
// over a connection first writes Padding zero bytes: they complete whatever frame its predecessor left half written, which then fails
// its trailer check.
//
// # Compatibility
//
// A decoder ignores bytes after the fields it knows, so a newer peer may append fields. HELLO and HELLO_ACK carry ProtocolVersion;
// the agent answers a host's with the older of the two.
//
// The encoding is written by hand and takes few branches on purpose: under QEMU's TCG every basic block that runs for the first time
// in a fork costs some 13 µs.
package agentproto

// ProtocolVersion is the version of the frames and messages. From 2 on the guest sends notices that nobody asked for.
const ProtocolVersion uint16 = 2

// Oldest version that this one can talk to.
const OldestVersion uint16 = 1

// Agree is the version that an agent answers a host with: an older host refuses what it does not know.
func Agree(host uint16) uint16 { return min(max(host, OldestVersion), ProtocolVersion) }

// Limits. Peers enforce them before they allocate.
const (
	MaxPayload       = 64 << 10 // bytes of payload in a frame
	MaxMessage       = 32 << 20 // bytes of a message over all its frames
	DefaultMaxOutput = 1 << 20  // bytes kept of each output stream when a request says 0
	LimitMaxOutput   = 8 << 20  // the most a request may ask to keep of each output stream
	MinEntropy       = 32       // bytes of entropy an Identity must bring
	MaxCommands      = 64       // commands that may run at once in a guest
)

// Identity makes a fork an individual of its own.
type Identity struct {
	InstanceID string   // unique for each fork
	Hostname   string   // empty: the host name stays
	MachineID  string   // 32 lower case hexadecimal digits; empty: the machine id stays
	UnixNano   int64    // wall clock to set; 0: the clock stays
	Entropy    []byte   // fresh bytes of the host, at least MinEntropy
	Env        []string // K=V for every later exec and eval, besides FORKD_INSTANCE_ID; replaces what an earlier Identity set
	RunHooks   bool     // run the executables in /etc/forkd/on-fork.d
}

// IdentityAck says that an Identity was applied in full.
type IdentityAck struct {
	UnixNano int64  // the guest's clock after it was set
	Hooks    uint32 // hooks that ran
	Python   bool   // a resident interpreter was reseeded
}

// Pong answers a ping.
type Pong struct {
	UnixNano   int64  // the guest's clock
	UptimeNano int64  // since the guest booted, without the time it stood frozen
	PID        uint32 // of the agent
	Version    string // of the agent
	Python     bool   // the root file system has a python3, so eval can work
}

// ExecRequest runs a command.
type ExecRequest struct {
	Args      []string // the command and its arguments
	Env       []string // K=V, over the agent's own and the identity's
	Cwd       string   // empty: the user's home directory, or / when there is none
	User      string   // name or uid, with an optional ":group"; empty: root
	TimeoutMS uint32   // 0: none
	MaxOutput uint32   // bytes kept of each of stdout and stderr; 0: DefaultMaxOutput
	Stdin     []byte
}

// ExecResult is the end of a command.
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int32  // 128 + the signal's number when a signal ended the command
	Signal         string // name of the signal that ended the command, "" when it exited
	TimedOut       bool   // the command was killed because its time was up
	Truncated      bool   // stdout or stderr was longer than MaxOutput
	OOMKilled      bool   // the guest's kernel killed it, or a process that it had started, for want of memory
	DiskFull       bool   // it failed, and the guest's disk was full when it ended
}

// EvalRequest runs code in the resident Python interpreter.
type EvalRequest struct {
	Code      string
	TimeoutMS uint32 // 0: none
	MaxOutput uint32 // bytes kept of each of result, stdout and stderr; 0: DefaultMaxOutput
}

// EvalResult is the end of an evaluation.
type EvalResult struct {
	Result         string // repr of the last expression; "" when there is none or it is None
	Stdout, Stderr []byte
	Error          string // traceback; "" when the code ended well
	TimedOut       bool   // the time was up before the code ended, so it was interrupted
	Truncated      bool   // result, stdout or stderr was longer than MaxOutput
	OOMKilled      bool   // the guest's kernel killed the interpreter, or a process that it had started, for want of memory
	DiskFull       bool   // it failed, and the guest's disk was full when it ended
}

// Notice says what a guest is short of. It is sent when that changes, and at the beginning of a session unless it says nothing; nobody asks for it.
type Notice struct {
	OOMKills uint32 // processes that the kernel killed for want of memory since the machine became who it is
	Victim   string // name of the last of them
	DiskFull bool   // hardly anything can be written any more
	DiskFree uint64 // bytes that can be, when that was looked at last
	DiskSize uint64
}

// Code classifies an Error.
type Code string

// Codes of an Error.
const (
	CodeNoInterpreter Code = "no_interpreter" // the root file system has no python3
	CodeNotFound      Code = "not_found"      // no such command
	CodeBadRequest    Code = "bad_request"
	CodeBadUser       Code = "bad_user"
	CodeBadCwd        Code = "bad_cwd"
	CodeIdentity      Code = "identity" // the fork must not be used
	CodeBusy          Code = "busy"
	CodeCanceled      Code = "canceled" // a CANCEL overtook the request before it started
	CodeInternal      Code = "internal"
)

// Error is the agent's refusal or failure to serve a request.
type Error struct {
	Code    Code
	Message string
}

// Error implements error.
func (e *Error) Error() string { return "guest agent: " + e.Message + " (" + string(e.Code) + ")" }

// Hello opens a session; HELLO_ACK repeats it with the guest's version.
type Hello struct {
	Token   Token
	Version uint16
}

// Token identifies a connection.
type Token [16]byte

// Session is the session number in the frames after a Hello with this token.
func (t Token) Session() uint64 { return le64(t[:8]) }
