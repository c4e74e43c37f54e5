// SPDX-License-Identifier: GPL-2.0
/*
 * What calls of the published interface cost. It runs on this module and on the published one, and
 * says nanoseconds, which are instructions where the lab counts them:
 *
 *	cc -O2 -static -I kernel/include/uapi -o cost kernel/tests/programs/published_cost.c
 *	cargo run -p vellum-lab -- --kernel 6.1 --build kernel --count-instructions --processors 1 \
 *		run cost=cost
 *
 * Devices may be named; each round brings and frees 512 pages, whose tables are there.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vellum/exmap_published.h>

#define PAGES	512
#define BYTES	4096UL
#define ROUNDS	8
#define VECTOR	0xe000000000000000UL	/* where the first interface is mapped */

static int exmap;
static char *surface;
static __u64 *vector;

static void check(int is_right, const char *what)
{
	if (is_right)
		return;
	perror(what);
	exit(1);
}

static long action(unsigned int opcode, unsigned int entries)
{
	struct exmap_published_action action = { .iov_len = entries, .opcode = opcode };

	return ioctl(exmap, EXMAP_PUBLISHED_ACTION, &action);
}

static void one_by_one(unsigned int opcode)
{
	unsigned int i;

	for (i = 0; i < PAGES; i++) {
		vector[0] = i | 1UL << 52;
		check(!action(opcode, 1) && vector[0] == 1UL << 32, "a page");
	}
}

static void all_at_once(unsigned int opcode)
{
	unsigned int i;

	for (i = 0; i < PAGES; i++)
		vector[i] = i | 1UL << 52;
	check(!action(opcode, PAGES), "a vector");
}

static void by_pread(unsigned int opcode, ssize_t expected)
{
	unsigned int i;

	for (i = 0; i < PAGES; i++)
		check(pread(exmap, surface + i * BYTES, BYTES, opcode << 8) == expected, "pread");
}

static void alloc_one(void)	{ one_by_one(EXMAP_PUBLISHED_OP_ALLOC); }
static void free_one(void)	{ one_by_one(EXMAP_PUBLISHED_OP_FREE); }
static void alloc_all(void)	{ all_at_once(EXMAP_PUBLISHED_OP_ALLOC); }
static void free_all(void)	{ all_at_once(EXMAP_PUBLISHED_OP_FREE); }
static void alloc_by_pread(void) { by_pread(EXMAP_PUBLISHED_OP_ALLOC, BYTES); }
static void read_missing(void)	{ by_pread(EXMAP_PUBLISHED_OP_READ, BYTES); }
static void read_present(void)	{ by_pread(EXMAP_PUBLISHED_OP_READ, 0); }

static const struct {
	const char *name;
	void (*before)(void), (*measured)(void), (*after)(void);
} calls[] = {
	{ "ALLOC by pread", NULL, alloc_by_pread, free_all },
	{ "ALLOC of one page", NULL, alloc_one, free_all },
	{ "ALLOC of 512, a page", NULL, alloc_all, free_all },
	{ "FREE of one page", alloc_all, free_one, NULL },
	{ "FREE of 512, a page", alloc_all, free_all, NULL },
	{ "pread of a missing page", NULL, read_missing, free_all },
	{ "pread of a page that is there", read_missing, read_present, free_all },
};

static unsigned long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000UL + time.tv_nsec;
}

static void measure(const char *device)
{
	int file = open(device, O_RDWR | O_DIRECT);
	struct exmap_published_setup setup = { .fd = file, .max_interfaces = 1,
					       .buffer_size = 4 * PAGES };
	unsigned long began, took, least;
	unsigned int i, round;
	void *contents = mmap(NULL, PAGES * BYTES, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	memset(contents, 7, PAGES * BYTES);
	check(pwrite(file, contents, PAGES * BYTES, 0) == PAGES * BYTES, device);
	exmap = open("/dev/exmap", O_RDWR);
	surface = mmap(NULL, 4 * PAGES * BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, exmap, 0);
	check(surface != MAP_FAILED && !ioctl(exmap, EXMAP_PUBLISHED_SETUP, &setup), "an exmap");
	vector = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, exmap, VECTOR);
	check(vector != MAP_FAILED, "an interface");
	alloc_all();
	free_all();
	for (i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
		for (round = 0, least = -1UL; round < ROUNDS; round++) {
			if (calls[i].before)
				calls[i].before();
			began = now();
			calls[i].measured();
			took = now() - began;
			least = took < least ? took : least;
			if (calls[i].after)
				calls[i].after();
		}
		printf("%s: %s: %lu\n", device, calls[i].name, least / PAGES);
	}
	munmap(surface, 4 * PAGES * BYTES);
	munmap(vector, BYTES);
	munmap(contents, PAGES * BYTES);
	close(exmap);
	close(file);
}

int main(int count, char **names)
{
	int i;

	for (i = 1; i < count; i++)
		measure(names[i]);
	if (count > 1)
		return 0;
	measure("/dev/nullb0");
	measure("/dev/ram0");
	return 0;
}
