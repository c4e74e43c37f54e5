/*
 * Maps a file in many ways by the C library. Prints for each way which memory it was, "morsel",
 * "cached" or "file", and exits with 1 if any byte is wrong.
 *
 *     maps FILE          byte n of FILE is n % 251
 *     maps --kinds FILE  only finds out which memory it is
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
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

/* Whether an address is mapped from a "morsel", from a cache of this process, or from a "file". */
static const char *kind_of(const void *address)
{
	const char *line = line_of(address);

	if (strstr(line, "vellum-morsel") || strstr(line, "/vellum/morsels"))
		return "morsel";
	return strstr(line, "vellum-aquila") || !strchr(line, '/') ? "cached" : "file";
}

static int is_mapped(const void *address)
{
	return strlen(line_of(address)) > 0;
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
	printf("%s %s\n", name, kind_of(base));
	if (munmap(base, length) || is_mapped(base))
		fail("munmap");
}

/* MAP_PRIVATE or MAP_SHARED, for all further mappings. */
static int type = MAP_PRIVATE;

static unsigned char *whole(int file, size_t bytes)
{
	unsigned char *base = mmap(NULL, bytes, PROT_READ, type, file, 0);

	if (base == MAP_FAILED)
		fail("mmap");
	return base;
}

static void wait_for(pid_t child)
{
	int status;

	if (child < 0 || waitpid(child, &status, 0) != child || status)
		fail("a child");
}

/* Unmaps parts; the rest stays. Writes to private mappings, which no other process sees. */
static void parts(int file, size_t bytes)
{
	size_t half = bytes / 2 & ~(size_t)4095;
	unsigned char *base = whole(file, bytes);

	if (munmap(base, half))
		fail("munmap of a part");
	check(base + half, half, bytes - half);
	errno = 0;
	if (mprotect(base + half, 4096, PROT_READ | PROT_WRITE) ?
	    type == MAP_PRIVATE || errno != EACCES : type == MAP_SHARED)
		fail("mprotect to write");
	if (is_mapped(base))
		fail("a part that was unmapped is back");
	if (type == MAP_PRIVATE) {
		base[half] = 255;
		pid_t child = fork();
		if (child == 0)
			_exit(base[half] != 255 || base[half + 1] != (half + 1) % 251);
		wait_for(child);
	}
	check(base + half + 4096, half + 4096, bytes - half - 4096);
	if (munmap(base + half, bytes - half) || is_mapped(base + half))
		fail("munmap of the rest");
}

/* Calls that do not change a mapping succeed. */
static void harmless(int file, size_t bytes)
{
	unsigned char *base = whole(file, bytes);
	const char *kind = kind_of(base);

	if (madvise(base, bytes, MADV_WILLNEED) || madvise(base, 4096, MADV_SEQUENTIAL) ||
	    madvise(base + 4096, bytes - 4096, MADV_DONTNEED) ||
	    posix_madvise(base, bytes, POSIX_MADV_RANDOM))
		fail("advice");
	if (mlock(base + 100, 5000) || munlock(base + 100, 5000) || msync(base, bytes, MS_SYNC))
		fail("mlock");
	if (mprotect(base, bytes, PROT_READ) || mprotect(base + 4096, 4096, PROT_READ))
		fail("mprotect to read");
	/* A cache locks no pages: the file itself takes its place. */
	if (strcmp(kind_of(base + 4096), strcmp(kind, "cached") ? kind : "file"))
		fail("it is another mapping now");
	check(base, 0, bytes);
	errno = 0;
	if (mprotect(base + 1, 4096, PROT_READ) != -1 || errno != EINVAL)
		fail("an address within a page");
	if (madvise(base, bytes, MADV_DONTFORK))
		fail("not for children");
	pid_t child = fork();
	if (child == 0)
		_exit(is_mapped(base));
	wait_for(child);
	check(base, 0, bytes);
	munmap(base, bytes);
}

/* It can be moved, cut and replaced in parts, like any mapping. */
static void moved(int file, size_t bytes)
{
	size_t half = bytes / 2 & ~(size_t)4095;
	unsigned char *base = whole(file, bytes);
	int flags = MAP_PRIVATE | MAP_ANONYMOUS;

	if (mremap(base, bytes, half, 0) != base || is_mapped(base + half))
		fail("mremap to less");
	check(base, 0, half);
	base = mremap(base, half, bytes, MREMAP_MAYMOVE);
	if (base == MAP_FAILED)
		fail("mremap to more");
	check(base, 0, bytes);
	munmap(base, bytes);

	base = whole(file, bytes);
	if (mmap(base + 4096, 4096, PROT_READ, flags | MAP_FIXED, -1, 0) != base + 4096 ||
	    base[4096] || base[8191])
		fail("a part is replaced");
	check(base, 0, 4096);
	check(base + 8192, 8192, bytes - 8192);
	munmap(base, bytes);
	if (is_mapped(base) || is_mapped(base + 4096) || is_mapped(base + bytes - 1))
		fail("something is left");
}

/* A child has the mapping, and its changes do not affect the parent. */
static void children(int file, size_t bytes)
{
	unsigned char *base = whole(file, bytes);

	for (int round = 0; round < 3; round++) {
		pid_t child = fork();
		if (child == 0) {
			check(base, 0, bytes);
			if (round && munmap(base + 4096, bytes - 4096))
				fail("munmap in a child");
			check(base, 0, 4096);
			_exit(munmap(base, bytes) || is_mapped(base));
		}
		wait_for(child);
		check(base, 0, bytes);
	}
	munmap(base, bytes);
}

static struct {
	unsigned char *base;
	size_t bytes;
} unmapped_in_fork;

static void *unmap(void *unused)
{
	if (munmap(unmapped_in_fork.base, unmapped_in_fork.bytes))
		fail("munmap while another thread forks");
	return unused;
}

/* During fork, which may wait for a lock whose owner unmaps memory. */
static void before_fork(void)
{
	pthread_t thread;

	if (unmapped_in_fork.base &&
	    (pthread_create(&thread, NULL, unmap, NULL) || pthread_join(thread, NULL)))
		fail("a thread in fork");
	unmapped_in_fork.base = NULL;
}

static void while_forking(int file, size_t bytes)
{
	unsigned char *base = whole(file, bytes);

	unmapped_in_fork.bytes = bytes;
	unmapped_in_fork.base = whole(file, bytes);
	pid_t child = fork();
	if (child == 0) {
		check(base, 0, bytes);
		_exit(munmap(base, bytes) || is_mapped(base));
	}
	wait_for(child);
	munmap(base, bytes);
}

static struct {
	int file;
	size_t bytes;
	unsigned char *mapped[64];
	atomic_int next;
} all;

static void *work(void *unused)
{
	for (int round = 0; round < 20; round++) {
		unsigned char *base = whole(all.file, all.bytes);

		check(base + 4096, 4096, 4096);
		if (munmap(base + 4096, 4096))
			fail("munmap by a thread");
		check(base, 0, 4096);
		if (round % 4 == 0 && mprotect(base, 4096, PROT_NONE))
			fail("mprotect by a thread");
		check(base + 8192, 8192, 4096);
		munmap(base, all.bytes);
	}
	return unused;
}

static void handler(int signal)
{
	int next = atomic_fetch_add(&all.next, 1);

	if (next < 64 && munmap(all.mapped[next], all.bytes))
		abort();
	(void)signal;
}

/* Threads map at the same time, while signals arrive and children are forked. */
static void together(int file, size_t bytes)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
	pthread_t threads[3];

	all.file = file;
	all.bytes = bytes;
	for (int at = 0; at < 64; at++)
		all.mapped[at] = whole(file, bytes);
	sigaction(SIGUSR1, &action, NULL);
	for (int at = 0; at < 3; at++)
		if (pthread_create(&threads[at], NULL, work, NULL))
			fail("a thread");
	for (int round = 0; round < 64; round++) {
		pthread_kill(round % 4 == 3 ? pthread_self() : threads[round % 4], SIGUSR1);
		if (round % 8)
			continue;
		pid_t child = fork();
		if (child == 0) {
			unsigned char *last = all.mapped[63];
			_exit(last[4096] != 4096 % 251 || munmap(last, all.bytes));
		}
		wait_for(child);
	}
	for (int at = 0; at < 3; at++)
		pthread_join(threads[at], NULL);
	for (int at = atomic_load(&all.next); at < 64; at++)
		munmap(all.mapped[at], bytes);
}

static atomic_int readers_end;

static void *read_all(void *mapped)
{
	while (!atomic_load(&readers_end))
		check(mapped, 0, all.bytes);
	return NULL;
}

/* A thread reads a mapping while others of the same file come and go. */
static void beside_a_reader(int file, size_t bytes)
{
	unsigned char *base = whole(file, bytes);
	pthread_t thread;

	all.bytes = bytes;
	atomic_store(&readers_end, 0);
	if (pthread_create(&thread, NULL, read_all, base))
		fail("a thread");
	for (int round = 0; round < 100; round++) {
		unsigned char *other = whole(file, bytes);

		check(other, 0, 4096);
		munmap(other, bytes);
	}
	atomic_store(&readers_end, 1);
	pthread_join(thread, NULL);
	munmap(base, bytes);
}

/* What a thread stores to a page that it has made its own stays, whatever other threads map. */
static void *store(void *unused)
{
	for (int round = 0; round < 100; round++) {
		unsigned char *base = mmap(NULL, all.bytes, PROT_READ, MAP_PRIVATE, all.file, 0);

		check(base, 0, 4096);
		if (mprotect(base, 8192, PROT_READ | PROT_WRITE))
			fail("mprotect by a thread that stores");
		for (int at = 0; at < 8192; at += 512) {
			base[at] = 255;
			sched_yield();
		}
		for (int at = 0; at < 8192; at += 512)
			if (base[at] != 255)
				fail("a store was lost");
		munmap(base, all.bytes);
	}
	return unused;
}

static void stores(int file, size_t bytes)
{
	pthread_t threads[3];

	all.file = file;
	all.bytes = bytes;
	for (int at = 0; at < 3; at++)
		if (pthread_create(&threads[at], NULL, store, NULL))
			fail("a thread");
	for (int at = 0; at < 3; at++)
		pthread_join(threads[at], NULL);
}

/* A second mapping of the same memory, which mremap makes of a shared one. */
static void duplicate(int file, size_t bytes)
{
	unsigned char *base = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
	unsigned char *other = mremap(base, 0, bytes, MREMAP_MAYMOVE);

	if (base == MAP_FAILED || other == MAP_FAILED)
		fail("a duplicate");
	check(other, 0, bytes);
	munmap(base, bytes);
	check(other, 0, bytes);
	munmap(other, bytes);
}

/* A descriptor that can send signals does so afterwards. */
static void signals(int file, size_t bytes)
{
	if (fcntl(file, F_SETSIG, SIGUSR2) || fcntl(file, F_SETOWN, getpid()))
		fail("F_SETSIG");
	munmap(whole(file, bytes), bytes);
	if (fcntl(file, F_GETSIG) != SIGUSR2 || fcntl(file, F_GETOWN) != getpid())
		fail("the signal of the descriptor changed");
	if (fcntl(file, F_SETSIG, 0) || fcntl(file, F_SETOWN, 0))
		fail("F_SETSIG");
}

/*
 * A program may unmap holes that it has made in a mapping. The library's own memory must not be in
 * them.
 */
static void holes(int file, size_t bytes)
{
	enum { COUNT = 128 };
	unsigned char *first[COUNT], *second[COUNT];

	for (int at = 0; at < COUNT; at++) {
		first[at] = whole(file, bytes);
		/* The second call has the file itself take the mapping's place. */
		if (munmap(first[at] + 4096, 4096) || mprotect(first[at], 4096, PROT_NONE))
			fail("a hole");
	}
	for (int at = 0; at < COUNT; at++)
		second[at] = whole(file, bytes);
	for (int at = 0; at < COUNT; at++)
		munmap(first[at], bytes);
	for (int at = 0; at < COUNT; at++) {
		if (mprotect(second[at], 4096, PROT_NONE))
			fail("something of a mapping was in a hole");
		check(second[at] + 4096, 4096, bytes - 4096);
		munmap(second[at], bytes);
	}
}

/*
 * A program may close descriptors that it has not opened, and use any number. It keeps its locks on
 * a file when a mapping of the file ends.
 */
static void descriptors(int file, size_t bytes)
{
	unsigned char *base = whole(file, bytes);
	int first = dup(file), at;

	check(base, 0, 4096);
	if (first < 0 || first > 63)
		fail("the lowest number that is free");
	close(first);
	/* It may have inherited some. */
	for (at = first; at < 2000; at++)
		close(at);
	for (at = first; at < 2000; at++)
		if (!close(at) || errno != EBADF)
			fail("a descriptor that the program does not have");
	check(base, 0, bytes);
	closefrom(first);
	if (close_range(first, ~0U, 0))
		fail("close_range");
	check(base, 0, bytes);
	for (at = first; at < 1000; at++)
		if (dup2(file, at) != at)
			fail("dup2");
	check(base, 0, bytes);
	pid_t child = fork();
	if (child == 0) {
		closefrom(3);
		check(base, 0, bytes);
		_exit(munmap(base, bytes));
	}
	wait_for(child);
	closefrom(first);
	check(base, 0, bytes);
	struct flock lock = { .l_type = F_RDLCK, .l_whence = SEEK_SET };
	if (fcntl(file, F_SETLK, &lock))
		fail("a lock");
	munmap(base, bytes);
	munmap(whole(file, bytes), bytes);
	/* The library ends mappings in its own time. */
	usleep(20000);
	child = fork();
	if (child == 0) {
		lock.l_type = F_WRLCK;
		_exit(fcntl(file, F_GETLK, &lock) || lock.l_type != F_RDLCK);
	}
	wait_for(child);
	lock.l_type = F_UNLCK;
	fcntl(file, F_SETLK, &lock);
}

static struct {
	pthread_barrier_t barrier;
	unsigned char *base;
	size_t pages;
	int rounds;
} halves;

/* Unmaps the second half of each mapping, from its end on. */
static void *unmap_second(void *unused)
{
	for (int round = 0; round < halves.rounds; round++) {
		pthread_barrier_wait(&halves.barrier);
		for (size_t page = halves.pages - 1; page > halves.pages / 2; page--)
			if (munmap(halves.base + 4096 * page, 4096))
				fail("munmap of a page");
		pthread_barrier_wait(&halves.barrier);
	}
	return unused;
}

/* Two threads unmap parts of one mapping: nothing is left. A child that is forked meanwhile has the
 * page between the halves. */
static void apart(int file, size_t bytes)
{
	pthread_t thread;

	halves.pages = (bytes + 4095) / 4096;
	halves.rounds = 100;
	pthread_barrier_init(&halves.barrier, NULL, 2);
	if (pthread_create(&thread, NULL, unmap_second, NULL))
		fail("a thread");
	for (int round = 0; round < halves.rounds; round++) {
		size_t half = halves.pages / 2;
		unsigned char *base = halves.base = whole(file, bytes);
		pid_t child = -1;

		pthread_barrier_wait(&halves.barrier);
		if (round % 4 == 0) {
			child = fork();
			if (child == 0)
				_exit(base[4096 * half] != 4096 * half % 251);
		}
		for (size_t page = 0; page < half; page++)
			if (munmap(base + 4096 * page, 4096))
				fail("munmap of a page");
		if (round % 4 == 0)
			wait_for(child);
		check(base + 4096 * half, 4096 * half, 4096);
		pthread_barrier_wait(&halves.barrier);
		if (munmap(base + 4096 * half, 4096))
			fail("munmap of the last page");
		void *place = mmap(base, 4096 * halves.pages, PROT_NONE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
		if (place != base)
			fail("a page that was unmapped is still there");
		munmap(base, 4096 * halves.pages);
	}
	pthread_join(thread, NULL);
	pthread_barrier_destroy(&halves.barrier);
}

/* A file in memory whose first descriptor writes. */
static void memory_file(void)
{
	char path[64], byte = 'a';
	int writer = memfd_create("test", 0);

	snprintf(path, sizeof(path), "/proc/self/fd/%d", writer);
	int reader = open(path, O_RDONLY);
	if (writer < 0 || reader < 0 || ftruncate(writer, 100000) || write(writer, &byte, 1) != 1)
		fail("a file in memory");
	unsigned char *base = whole(reader, 100000);
	if (base[0] != 'a' || pwrite(writer, "b", 1, 0) != 1 || base[0] != 'b')
		fail("what was written to memory is not there");
	munmap(base, 100000);
	close(writer);
	close(reader);
}

static void write_byte(const char *path, size_t at, unsigned char byte)
{
	int file = open(path, O_RDWR);

	if (file < 0 || pwrite(file, &byte, 1, at) != 1)
		fail("writing");
	close(file);
}

/* What this process and others write to the file is seen in mappings that were there before. */
static void written(const char *path, int file, size_t bytes)
{
	size_t at = bytes / 2;
	unsigned char *base = whole(file, bytes), *other = whole(file, bytes), old = base[at];

	/* A file that is written cannot become a Morsel soon, which other tests need. */
	if (!strcmp(kind_of(base), "cached")) {
		check(base, 0, bytes);
		write_byte(path, at, old ^ 255);
		if (base[at] != (old ^ 255) || other[at] != (old ^ 255))
			fail("what this process wrote is not there");
		write_byte(path, at, old);
		check(other, 0, bytes);
		munmap(base, bytes);
		munmap(other, bytes);
		base = whole(file, bytes);
		other = whole(file, bytes);
		check(other, 0, bytes);
		pid_t child = fork();
		if (child == 0) {
			write_byte(path, at, old ^ 255);
			_exit(0);
		}
		wait_for(child);
		if (base[at] != (old ^ 255) || other[at] != (old ^ 255))
			fail("what a child wrote is not there");
		write_byte(path, at, old);
	}
	munmap(base, bytes);
	munmap(other, bytes);
}

static void errors(int file)
{
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
	const char *path = arguments[count - 1];
	int file = open(path, O_RDONLY), writable;
	struct stat stat;

	/* Registered before the library could register anything, so it is called after that. */
	pthread_atfork(before_fork, NULL, NULL);
	if (file < 0 || fstat(file, &stat))
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
	/* While the file is open for writing, no mapping is of a Morsel. */
	writable = open(path, O_RDWR);
	if (writable < 0)
		fail("opening for writing");
	try("beside-a-writer", file, 0, bytes, PROT_READ, MAP_SHARED);
	try("read-write-shared", writable, 0, bytes, PROT_READ, MAP_SHARED);
	try("read-write-private", writable, 0, bytes, PROT_READ, MAP_PRIVATE);
	close(writable);
	if (count > 2)
		return 0;
	for (int round = 0; round < 2; round++) {
		type = round ? MAP_SHARED : MAP_PRIVATE;
		parts(file, bytes);
		harmless(file, bytes);
		moved(file, bytes);
		children(file, bytes);
		while_forking(file, bytes);
		beside_a_reader(file, bytes);
	}
	together(file, bytes);
	stores(file, bytes);
	holes(file, bytes);
	apart(file, bytes);
	memory_file();
	descriptors(file, bytes);
	duplicate(file, bytes);
	signals(file, bytes);
	errors(file);
	written(path, file, bytes);
	return 0;
}
