package probeguest

// A guest is assembled by GNU as, linked at its address and stripped to its code. TestCodeIsItsSource does the same and compares.
//
//go:generate sh -c "as --64 guest.S -o g.o && ld -m elf_x86_64 -Ttext 0x100000 -e 0 g.o -o g.elf && objcopy -O binary -j .text g.elf guest.bin; rm -f g.o g.elf"
//go:generate sh -c "as --64 selftest.S -o g.o && ld -m elf_x86_64 -Ttext 0xffff0000 -e 0 g.o -o g.elf && objcopy -O binary -j .text g.elf selftest.bin; rm -f g.o g.elf"
