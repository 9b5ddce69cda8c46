package stage

// The program is assembled by GNU as, linked at its address and stripped to its code. TestCodeIsItsSource does the same and compares.
//
//go:generate sh -c "as --64 stage.S -o g.o && ld -m elf_x86_64 -Ttext 0x400000 -e 0 g.o -o g.elf && objcopy -O binary -j .text g.elf stage.bin; rm -f g.o g.elf"
