/* Every function of the header, on each backend; exits with 0 and prints "ok" at the end. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vellum_aquila.h"

#define LAST_ERROR vellum_aquila_last_error
#include "check.h"

#define PAGE  4096
#define PAGES 300
#define BYTES (PAGES * PAGE + 100)

static int make(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0);
	for (int page = 0; page <= PAGES; page++) {
		unsigned char bytes[PAGE];

		memset(bytes, page % 251, PAGE);
		CHECK(pwrite(fd, bytes, PAGE, (off_t)page * PAGE) == PAGE);
	}
	CHECK(ftruncate(fd, BYTES) == 0);
	return fd;
}

static unsigned char in_file(int fd, size_t at)
{
	unsigned char byte;

	CHECK(pread(fd, &byte, 1, at) == 1);
	return byte;
}

static vellum_aquila *cache_of(uint32_t backend, uint32_t policy, uint32_t faults)
{
	struct vellum_aquila_options options = {
		.size = 64 * PAGE,
		.capacity = 128 * PAGE,
		.backend = backend,
		.policy = policy,
		.faults = faults,
	};
	vellum_aquila *cache = NULL;
	int error = vellum_aquila_open(&options, &cache);

	/* Not on every machine. */
	if (error) {
		CHECK(error == -EOPNOTSUPP && !cache);
		CHECK(strstr(vellum_aquila_last_error(), "does not work here"));
	}
	return cache;
}

static void read_and_write(vellum_aquila *cache)
{
	int fd = make("file"), is_own = vellum_aquila_backend(cache) == VELLUM_AQUILA_USERFAULTFD;
	vellum_aquila_mapping *mapping, *part;
	struct vellum_aquila_statistics statistics;
	unsigned char *base, some[10];
	uint64_t pages;

	CHECK(vellum_aquila_map(cache, fd, 0, 0, VELLUM_AQUILA_READ_WRITE, &mapping) == 0);
	CHECK(vellum_aquila_map(cache, fd, 10 * PAGE, 5, VELLUM_AQUILA_READ, &part) == 0);
	CHECK(vellum_aquila_mapping_length(mapping) == BYTES);
	CHECK(vellum_aquila_mapping_length(part) == 5);
	base = vellum_aquila_mapping_base(mapping);
	for (uint32_t advice = VELLUM_AQUILA_NORMAL; advice <= VELLUM_AQUILA_SEQUENTIAL; advice++) {
		CHECK(vellum_aquila_advise(mapping, advice) == 0);
		for (int page = 0; page <= PAGES; page++)
			CHECK(base[page * PAGE] == page % 251);
	}
	CHECK(vellum_aquila_prefetch(mapping, 0, 8 * PAGE, &pages) == 0);
	CHECK(vellum_aquila_prefetch(mapping, 0, 8 * PAGE, NULL) == 0);
	base[20 * PAGE] = 255;
	base[10 * PAGE] = 254;
	CHECK(*(unsigned char *)vellum_aquila_mapping_base(part) == 254);
	CHECK(vellum_aquila_write(mapping, 30 * PAGE - 1, "ab", 2) == 0);
	CHECK(vellum_aquila_read(mapping, 30 * PAGE - 2, some, 4) == 0);
	CHECK(memcmp(some, (unsigned char[]){ 29, 'a', 'b', 30 }, 4) == 0);
	CHECK(vellum_aquila_write_back(mapping, 20 * PAGE, 1) == 0 && in_file(fd, 20 * PAGE) == 255);
	CHECK(vellum_aquila_sync(mapping) == 0 && in_file(fd, 30 * PAGE) == 'b');
	CHECK(vellum_aquila_evict(mapping, 0, BYTES, &pages) == 0);
	if (is_own) {
		CHECK(pages > 0 && pages <= 64);
		CHECK(vellum_aquila_get_statistics(cache, &statistics) == 0);
		CHECK(statistics.misses >= PAGES && statistics.evictions >= PAGES);
		CHECK(statistics.written_back >= 4 && statistics.dirty == 0);
		CHECK(statistics.frames == 64 && statistics.write_errors == 0);
		CHECK(vellum_aquila_resize(cache, 128 * PAGE) == 0);
		CHECK(vellum_aquila_get_statistics(cache, &statistics) == 0);
		CHECK(statistics.frames == 128);
		CHECK(vellum_aquila_resize(cache, 129 * PAGE) == -EINVAL);
		CHECK(vellum_aquila_why_not_better(cache) == 0);
	} else {
		CHECK(vellum_aquila_get_statistics(cache, &statistics) == -EOPNOTSUPP);
		CHECK(vellum_aquila_resize(cache, 128 * PAGE) == -EOPNOTSUPP);
		CHECK(vellum_aquila_why_not_better(cache) == -EOPNOTSUPP);
		CHECK(strstr(vellum_aquila_last_error(), "asked for"));
	}
	CHECK(vellum_aquila_set_length(cache, fd, 50 * PAGE) == 0);
	CHECK(vellum_aquila_read(mapping, 50 * PAGE, some, 1) == -ENXIO);
	CHECK(vellum_aquila_write(mapping, BYTES - 1, "ab", 2) == -EINVAL);
	CHECK(vellum_aquila_write(part, 0, "a", 1) == -EACCES);
	/* Handles in any order. */
	vellum_aquila_close(cache);
	base[40 * PAGE] = 253;
	CHECK(vellum_aquila_unmap(part) == 0);
	CHECK(vellum_aquila_unmap(mapping) == 0 && in_file(fd, 40 * PAGE) == 253);
	close(fd);
}

static void pins(vellum_aquila *cache)
{
	int fd = make("file"), out = open("out", O_RDWR | O_CREAT | O_TRUNC, 0600);
	vellum_aquila_mapping *mapping;
	vellum_aquila_pin *pin, *other = NULL;
	char *base, copy[2 * PAGE];

	CHECK(vellum_aquila_map(cache, fd, 0, BYTES, VELLUM_AQUILA_READ, &mapping) == 0);
	base = vellum_aquila_mapping_base(mapping);
	CHECK(vellum_aquila_pin_pages(mapping, PAGE, 2 * PAGE, VELLUM_AQUILA_READ, &pin) == 0);
	CHECK(write(out, base + PAGE, 2 * PAGE) == 2 * PAGE);
	CHECK(pread(out, copy, 2 * PAGE, 0) == 2 * PAGE && copy[0] == 1 && copy[PAGE] == 2);
	CHECK(vellum_aquila_pin_pages(mapping, 0, 1, VELLUM_AQUILA_READ_WRITE, &other) == -EACCES);
	CHECK(vellum_aquila_pin_pages(mapping, BYTES, 1, VELLUM_AQUILA_READ, &other) == -EINVAL);
	CHECK(!other);
	vellum_aquila_close(cache);
	/* The pin keeps the mapping. */
	CHECK(vellum_aquila_unmap(mapping) == 0 && base[PAGE] == 1);
	vellum_aquila_unpin(pin);
	close(fd);
	close(out);
}

static void errors(void)
{
	struct vellum_aquila_options options = { .size = 1 << 20, .backend = 7 };
	vellum_aquila_mapping *mapping = NULL;
	vellum_aquila *cache = NULL;
	int fd = open("file", O_RDONLY), proc = open("/proc/self/stat", O_RDONLY);

	CHECK(vellum_aquila_open(&options, &cache) == -EINVAL);
	options.backend = VELLUM_AQUILA_AUTO;
	options.policy = 3;
	CHECK(vellum_aquila_open(&options, &cache) == -EINVAL);
	options.policy = 0;
	options.size = PAGE;
	CHECK(vellum_aquila_open(&options, &cache) == -EINVAL);
	CHECK(strstr(vellum_aquila_last_error(), "256 KiB"));
	CHECK(vellum_aquila_open(NULL, &cache) == -EINVAL && !cache);
	options.size = 1 << 20;
	CHECK(vellum_aquila_open(&options, NULL) == -EINVAL);
	CHECK(vellum_aquila_open(&options, &cache) == 0);
	CHECK(vellum_aquila_map(cache, fd, 0, 0, VELLUM_AQUILA_READ_WRITE, &mapping) == -EACCES);
	CHECK(vellum_aquila_map(cache, fd, 1, 1, VELLUM_AQUILA_READ, &mapping) == -EINVAL);
	CHECK(vellum_aquila_map(cache, fd, 0, UINT64_MAX, VELLUM_AQUILA_READ, &mapping) == -EINVAL);
	CHECK(vellum_aquila_map(cache, -1, 0, 0, VELLUM_AQUILA_READ, &mapping) == -EBADF);
	CHECK(vellum_aquila_map(cache, fd, 0, 0, 2, &mapping) == -EINVAL);
	if (vellum_aquila_backend(cache) == VELLUM_AQUILA_USERFAULTFD)
		CHECK(vellum_aquila_map(cache, proc, 0, PAGE, VELLUM_AQUILA_READ, &mapping) == -ENODEV);
	CHECK(vellum_aquila_set_length(cache, fd, 0) == -EACCES);
	CHECK(vellum_aquila_sync(NULL) == -EINVAL && !mapping);
	CHECK(vellum_aquila_unmap(NULL) == 0 && vellum_aquila_mapping_base(NULL) == NULL);
	CHECK(vellum_aquila_mapping_length(NULL) == 0 && vellum_aquila_backend(NULL) == 0);
	vellum_aquila_unpin(NULL);
	vellum_aquila_close(NULL);
	vellum_aquila_close(cache);
	close(fd);
	close(proc);
}

int main(void)
{
	vellum_aquila *cache;

	for (uint32_t backend = VELLUM_AQUILA_AUTO; backend <= VELLUM_AQUILA_KERNEL; backend++) {
		for (uint32_t policy = VELLUM_AQUILA_S3_FIFO; policy <= VELLUM_AQUILA_LRU; policy++) {
			cache = cache_of(backend, policy, VELLUM_AQUILA_SIGNAL);
			if (cache)
				read_and_write(cache);
		}
	}
	for (uint32_t faults = VELLUM_AQUILA_SIGNAL; faults <= VELLUM_AQUILA_MONITOR; faults++) {
		cache = cache_of(VELLUM_AQUILA_USERFAULTFD, VELLUM_AQUILA_CLOCK, faults);
		if (cache)
			pins(cache);
	}
	cache = cache_of(VELLUM_AQUILA_KERNEL, 0, 0);
	CHECK(cache);
	pins(cache);
	errors();
	puts("ok");
	return 0;
}
