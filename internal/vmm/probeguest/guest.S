# The probe guest: what Firecracker starts where only plain instructions run. No operating system, no interrupts, no SSE. It is entered in
# 64-bit mode with its memory below 1 GiB mapped one to one, says R on the first serial port, and then does what it is told there:
#   T n  touches n pages from FIRST on and says T            (n: 4 bytes, little-endian)
#   G n  reads a word of n pages from FIRST on and says G
#   W n  says W and works on n pages from FIRST on, round after round: each page must hold the number of the round before in its first and
#        its last word, and is given the number of this round. Every other page than that is counted as torn.
#   S    says S, the count of torn pages and the number of the round, 4 bytes each
#   M    says M and for how long its work stood still at most since the last M, in 256 ticks of the time stamp counter, 4 bytes
#   H    says H and halts for ever: an idle guest that costs nothing
# Any other byte comes back as it is. The generator is in generate.go.
	.set DATA, 0x3f8		# serial port
	.set STATUS, 0x3fd
	.set FIRST, 0x400000		# first page that is worked on
	.set TABLES, 0x200000		# page directories of the second GiB and on
	.set GIB, 7			# how many of them

	.text
	.code64
start:
	movl $0x8ff0, %esp
	# Map what lies above 1 GiB, in pages of 2 MiB.
	movl $TABLES, %edi
	movl $0x40000000, %eax
	movl $(GIB * 512), %ecx
1:	movq %rax, (%rdi)
	orl $0x83, (%rdi)
	addq $0x200000, %rax
	addq $8, %rdi
	decl %ecx
	jnz 1b
	movq %cr3, %rdi
	movq (%rdi), %rdi		# the directory pointers of the first 512 GiB
	andq $-4096, %rdi
	movl $(TABLES + 3), %eax
	movl $GIB, %ecx
2:	addq $8, %rdi
	movq %rax, (%rdi)
	addq $4096, %rax
	decl %ecx
	jnz 2b
	xorl %r13d, %r13d		# torn pages
	xorl %r12d, %r12d		# number of the round
	movb $'R', %al
	call put

command:
	call get
	jc command
	call obey
	jmp command

# obey does what the byte in al says. It changes all registers but r8, r9 and r12 to r15.
obey:
	cmpb $'T', %al
	je touch
	cmpb $'G', %al
	je read
	cmpb $'W', %al
	je work
	cmpb $'S', %al
	je say
	cmpb $'M', %al
	je longest
	cmpb $'H', %al
	jne put
	call put
3:	hlt
	jmp 3b

touch:
	call number
	movl $FIRST, %edi
4:	movq %rcx, (%rdi)
	addq $4096, %rdi
	decl %ecx
	jnz 4b
	movb $'T', %al
	jmp put

read:
	call number
	movl $FIRST, %edi
13:	movq (%rdi), %rax
	addq $4096, %rdi
	decl %ecx
	jnz 13b
	movb $'G', %al
	jmp put

say:
	call put
	movl %r13d, %eax
	call put4
	movl %r12d, %eax
	jmp put4

longest:
	call put
	movq %r8, %rax
	shrq $8, %rax
	call put4
	call beat			# what is said takes time, too
	xorl %r8d, %r8d
	ret

# beat notes in r8 for how long at most it was not called, and in r9 when it was.
beat:
	rdtsc
	shlq $32, %rdx
	orq %rdx, %rax
	movq %rax, %rdx
	subq %r9, %rdx
	movq %rax, %r9
	cmpq %r8, %rdx
	jbe 14f
	movq %rdx, %r8
14:	ret

# work never returns. r14 is the number of pages, rdi the page, ecx how many are left of the round.
work:
	call number
	movl %ecx, %r14d
	xorl %r13d, %r13d
	movl $1, %r12d
	movl $FIRST, %edi
5:	movq %r12, (%rdi)
	movq %r12, 4088(%rdi)
	addq $4096, %rdi
	decl %ecx
	jnz 5b
	movb $'W', %al
	call put
	call beat
	xorl %r8d, %r8d
round:
	movq %r12, %r15			# what each page must hold
	incq %r12
	movl $FIRST, %edi
	movl %r14d, %ecx
6:	cmpq %r15, (%rdi)
	jne torn
	cmpq %r15, 4088(%rdi)
	jne torn
7:	movq %r12, (%rdi)
	movq %r12, 4088(%rdi)
	addq $4096, %rdi
	decl %ecx
	jz 8f
	testl $7, %ecx
	jnz 6b
	call beat
	testl $127, %ecx		# ask for a command now and then
	jnz 6b
	call poll
	jmp 6b
8:	call beat
	call poll
	jmp round
torn:
	incl %r13d
	jmp 7b

# poll obeys a command that has come, and keeps rdi and ecx.
poll:
	pushq %rdi
	pushq %rcx
	call get
	jc 9f
	call obey
9:	popq %rcx
	popq %rdi
	ret

# number reads 4 bytes into ecx.
number:
	xorl %ebx, %ebx
	movl $4, %ebp
10:	call get
	jc 10b
	movzbl %al, %eax
	orl %eax, %ebx
	rorl $8, %ebx
	decl %ebp
	jnz 10b
	movl %ebx, %ecx
	ret

# get reads a byte into al; the carry says that there is none.
get:
	movw $STATUS, %dx
	inb %dx, %al
	testb $1, %al
	jz 11f
	movw $DATA, %dx
	inb %dx, %al
	clc
	ret
11:	stc
	ret

# put writes al.
put:
	movw $DATA, %dx
	outb %al, %dx
	ret

# put4 writes eax.
put4:
	movl $4, %ebp
12:	call put
	shrl $8, %eax
	decl %ebp
	jnz 12b
	ret
