# It takes the place of the monitor until that has what it inherits, and its seccomp filter; Firecracker's jailer takes it for Firecracker.
#
# The jailer closes all descriptors but 0, 1 and 2, so the monitor's come through a socket that is descriptor 0. They are the lowest free
# ones here, one after the other, which are the numbers that the monitor is told. The bytes that come with them are an image of the memory
# at MESSAGE, with addresses in it (Message in stage.go); who sends them closes his end behind the last. Then the real monitor is executed with the
# arguments that the jailer gave. It uses no library, no stack but for its arguments, and asks for no memory: there is nothing to go wrong
# but system calls, and each that fails is named on descriptor 2 and ends it with the error's number.

	.intel_syntax noprefix
	.equ	MESSAGE, 0x500000
	.equ	ROOM, 0x10000			# of the message; behind it:
	.equ	CONTROL, MESSAGE + ROOM		# a control message with descriptors
	.equ	CONTROL_ROOM, 0x1000
	.equ	VECTOR, CONTROL + CONTROL_ROOM	# struct iovec
	.equ	HEADER, VECTOR + 16		# struct msghdr

	# Fields of the message.
	.equ	SIZE, 0				# of all of it
	.equ	STDIN, 4			# the last descriptor, which is to be descriptor 0
	.equ	PROGRAM, 8			# the address of its path
	.equ	DIRECTORY, 16
	.equ	ENVIRONMENT, 24			# the address of a list of addresses
	.equ	FILTER, 32			# struct sock_fprog

	.equ	SYS_close, 3
	.equ	SYS_dup2, 33
	.equ	SYS_recvmsg, 47
	.equ	SYS_execve, 59
	.equ	SYS_exit_group, 231
	.equ	SYS_write, 1
	.equ	SYS_chdir, 80
	.equ	SYS_seccomp, 317
	.equ	MSG_CTRUNC, 8

	# what is done next, for the message of a failure
	.macro	step name
	lea	r14, [rip + 8f]
	mov	r15d, offset 9f - 8f
	jmp	9f
8:	.ascii	"forkd's stage failed to \name\n"
9:
	.endm

	.text
	mov	r12, rsp			# argc, argv …, 0
	mov	ebx, MESSAGE			# where the next bytes go
	xor	ebp, ebp			# the last descriptor that came

	step	"receive what the monitor inherits"
receive:
	mov	edi, VECTOR
	mov	[rdi], rbx
	mov	eax, MESSAGE + ROOM
	sub	rax, rbx
	mov	[rdi + 8], rax
	mov	esi, HEADER
	mov	qword ptr [rsi + 16], rdi	# msg_iov
	mov	qword ptr [rsi + 24], 1
	mov	eax, CONTROL
	mov	qword ptr [rsi + 32], rax	# msg_control
	mov	qword ptr [rsi + 40], CONTROL_ROOM
	xor	edi, edi
	xor	edx, edx
	mov	eax, SYS_recvmsg
	syscall
	test	rax, rax
	js	failed
	jz	received
	add	rbx, rax
	mov	eax, 24				# EMFILE, if some did not fit
	neg	rax
	test	dword ptr [HEADER + 48], MSG_CTRUNC
	jnz	failed
	cmp	qword ptr [HEADER + 40], 0
	je	receive
	mov	rax, [CONTROL]			# cmsg_len
	mov	ebp, [CONTROL + rax - 4]
	jmp	receive

received:
	mov	rax, -71			# EPROTO, if it was not all
	sub	ebx, MESSAGE
	cmp	ebx, 48
	jb	failed
	cmp	ebx, [MESSAGE + SIZE]
	jne	failed
	cmp	ebp, [MESSAGE + STDIN]		# or if descriptors were open that have their numbers
	jne	failed

	step	"enter the machine's directory"
	mov	rdi, [MESSAGE + DIRECTORY]
	mov	eax, SYS_chdir
	syscall
	test	rax, rax
	js	failed

	step	"give the monitor its standard input"
	mov	edi, ebp
	xor	esi, esi
	mov	eax, SYS_dup2
	syscall
	test	rax, rax
	js	failed
	mov	edi, ebp
	mov	eax, SYS_close
	syscall

	step	"install the seccomp filter"
	mov	edi, 1				# SECCOMP_SET_MODE_FILTER
	xor	esi, esi
	mov	edx, MESSAGE + FILTER
	mov	eax, SYS_seccomp
	syscall
	test	rax, rax
	js	failed

	step	"execute the monitor"
	mov	rdi, [MESSAGE + PROGRAM]
	lea	rsi, [r12 + 8]
	mov	rdx, [MESSAGE + ENVIRONMENT]
	mov	eax, SYS_execve
	syscall

failed:
	mov	r13, rax
	mov	edi, 2
	mov	rsi, r14
	mov	edx, r15d
	mov	eax, SYS_write
	syscall
	mov	rdi, r13
	neg	rdi
	mov	eax, SYS_exit_group
	syscall
