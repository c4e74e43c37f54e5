/*
 * Maps a file in many ways with the C library alone. Says of each way whose memory it was, "morsel"
 * or "file", and exits with 1 if any byte is wrong.
 *
 *     maps FILE      byte n of FILE is n % 251
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

/* The line of /proc/self/maps that an address is in; "" if it is in none. */
static const char *line_of(const void *address)
{
	static char line[4096];
	unsigned long start, end;
	FILE *maps = fopen("/proc/self/maps", "r");

	while (fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx", &start, &end) == 2 &&
		    start <= (uintptr_t)address && (uintptr_t)address < end) {
			fclose(maps);
			return line;
		}
	}
	fclose(maps);
	return "";
}

static void check(const unsigned char *base, size_t offset, size_t length)
{
	for (size_t at = 0; at < length; at++)
		if (base[at] != (offset + at) % 251)
			fail("a byte is wrong");
}

static void try(const char *name, int file, size_t offset, size_t length, int rights, int flags)
{
	unsigned char *base = mmap(NULL, length, rights, flags, file, offset);

	if (base == MAP_FAILED)
		fail(name);
	check(base, offset, length);
	printf("%s %s\n", name, strstr(line_of(base), "vellum-morsel") ? "morsel" : "file");
	if (munmap(base, length) || strlen(line_of(base)))
		fail("munmap");
}

static void others(int file, size_t bytes)
{
	size_t half = bytes / 2 & ~(size_t)4095;
	unsigned char *base = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0);

	/* Parts go, the rest stays; a private copy may be written; a child has it. */
	if (munmap(base, half) || strlen(line_of(base)))
		fail("munmap of a part");
	check(base + half, half, bytes - half);
	if (mprotect(base + half, 4096, PROT_READ | PROT_WRITE))
		fail("mprotect");
	base[half] = 255;
	pid_t child = fork();
	if (child == 0)
		_exit(base[half] == 255 && base[half + 1] == (half + 1) % 251 ? 0 : 1);
	int status;
	if (waitpid(child, &status, 0) != child || status)
		fail("a child");

	errno = 0;
	if (mmap(NULL, 4096, PROT_READ, MAP_SHARED, 1000, 0) != MAP_FAILED || errno != EBADF)
		fail("a descriptor that is none");
	if (mmap(NULL, 0, PROT_READ, MAP_SHARED, file, 0) != MAP_FAILED || errno != EINVAL)
		fail("no bytes");
	if (mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) != MAP_FAILED ||
	    errno != EACCES)
		fail("writing a file that was opened for reading");
}

int main(int count, char **arguments)
{
	int file = open(arguments[count - 1], O_RDONLY), writable = open(arguments[1], O_RDWR);
	struct stat stat;

	if (file < 0 || writable < 0 || fstat(file, &stat))
		fail("opening");
	size_t bytes = stat.st_size, last = (bytes - 1) & ~(size_t)4095;

	errno = 7;
	try("shared", file, 0, bytes, PROT_READ, MAP_SHARED);
	if (errno != 7)
		fail("the error number changed");
	try("private", file, 0, bytes, PROT_READ, MAP_PRIVATE);
	try("populated", file, 0, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE);
	try("part", file, 4096, 5000, PROT_READ, MAP_PRIVATE);
	try("end", file, last, bytes - last, PROT_READ, MAP_SHARED);
	try("writing", file, 0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	try("read-write-shared", writable, 0, bytes, PROT_READ, MAP_SHARED);
	try("read-write-private", writable, 0, bytes, PROT_READ, MAP_PRIVATE);
	others(file, bytes);
	return 0;
}
