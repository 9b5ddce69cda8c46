# The KVM self-test's guest: a ROM of 64 KiB that does, one after another, what a stock 64-bit kernel can't do without, and prints a
# letter on port 0x402 after each. It ends by a write to port 0xf4 (isa-debug-exit). selftest.bin is its code up to the reset vector:
#   as --64 selftest.S -o t.o && ld -m elf_x86_64 -Ttext 0xffff0000 -e 0 t.o -o t.elf && objcopy -O binary -j .text t.elf selftest.bin
	.set DEBUGCON, 0x402
	.set EXIT, 0xf4
	.macro say c
	movw $DEBUGCON, %dx
	movb $\c, %al
	outb %al, %dx
	.endm

	.text
rom:
	.code16
start16:
	cli
	say 'R'				# real mode runs
	lgdtl %cs:(gdt_pointer - rom)
	movl %cr0, %eax
	orb $1, %al
	movl %eax, %cr0
	ljmpl $8, $start32

	.code32
start32:
	movw $16, %ax
	movw %ax, %ds
	movw %ax, %es
	movw %ax, %ss
	movl $0x8000, %esp
	say 'P'				# protected mode
	# Page tables at 0x1000: the first 2 MiB (RAM) and the last 2 MiB below 4 GiB (this ROM), one to one.
	movl $0x2003, 0x1000		# PML4[0] -> PDPT
	movl $0x3003, 0x2000		# PDPT[0] -> PD of the first GiB
	movl $0x4003, 0x2018		# PDPT[3] -> PD of the fourth GiB
	movl $0x00000083, 0x3000
	movl $0xffe00083, 0x4ff8
	movl $0x1000, %eax
	movl %eax, %cr3
	movl %cr4, %eax
	orl $0x620, %eax		# PAE, OSFXSR, OSXMMEXCPT
	movl %eax, %cr4
	movl $0xc0000080, %ecx		# EFER
	rdmsr
	orl $0x100, %eax		# LME
	wrmsr
	movl %cr0, %eax
	andl $0xfffffffb, %eax		# EM off
	orl $0x80000002, %eax		# PG, MP
	movl %eax, %cr0
	ljmpl $24, $start64

	.code64
start64:
	movl $0x8000, %esp
	say 'L'				# long mode
	movl $7, %eax
	movd %eax, %xmm0
	paddd %xmm0, %xmm0
	movd %xmm0, %eax
	cmpl $14, %eax
	jne fail
	say 'S'				# SSE2
	movl $0x6000, %esi
	xorl %eax, %eax
	xorl %edx, %edx
	movl $5, %ebx
	movl $6, %ecx
	lock cmpxchg16b (%rsi)
	jne fail
	cmpq $6, 8(%rsi)
	jne fail
	say 'C'				# cmpxchg16b
	movl $1, %eax
	cpuid
	btl $26, %ecx			# XSAVE, where the CPU claims it
	jnc 1f
	movq %cr4, %rax
	orl $0x40000, %eax		# OSXSAVE
	movq %rax, %cr4
	xorl %ecx, %ecx
	movl $3, %eax
	xorl %edx, %edx
	xsetbv
	movl $0x7000, %esi
	xsave (%rsi)
	xrstor (%rsi)
1:	say 'X'
	pushq $16
	pushq $0x8000
	pushfq
	pushq $24
	leaq 2f(%rip), %rax
	pushq %rax
	iretq
2:	say 'I'				# iretq
	movl $100000, %ecx		# and not at the speed of an interpreter
3:	decl %ecx
	jnz 3b
	say 'D'
	movb $0, %al
	jmp done
fail:
	movb $1, %al
done:
	movw $EXIT, %dx
	outb %al, %dx
4:	hlt
	jmp 4b

	.balign 8
gdt:
	.quad 0
	.quad 0x00cf9a000000ffff	# 8: code, 32 bits
	.quad 0x00cf92000000ffff	# 16: data
	.quad 0x00af9a000000ffff	# 24: code, 64 bits
gdt_pointer:
	.word . - gdt - 1
	.long gdt
end:
