/*
 * A program as users of the published exmap module write them, with definitions of its own of that
 * module's interface. It knows nothing of Vellum.
 *
 *	published anonymous		frames without a backing, by four threads
 *	published calls			pread and preadv that allocate
 *	published clones		private descriptors
 *	published errors		what must be refused
 *	published storage DEVICE	pages are read through the proxy, and written back by Linux' own
 *					asynchronous I/O, straight from the surface
 *
 * Ends with status 0 if all is well, and says what is not otherwise.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096ul
#define SLOTS 512u

enum { DO_READ = 0, DO_ALLOC = 1, DO_FREE = 2 };

struct config {
	int storage;
	int interfaces;
	size_t frames;
	uint64_t flags;
};

struct request {
	uint16_t interface;
	uint16_t slots;
	uint16_t operation;
	uint64_t flags;
};

struct counters {
	uint64_t flags;
	size_t frames;
	size_t resident;
	unsigned int interfaces;
};

/* A slot going in, and the same slot coming out. */
union slot {
	uint64_t word;
	struct {
		uint64_t page : 52;
		uint64_t length : 12;
	};
	struct {
		int32_t result;
		int16_t pages;
	};
};

#define CONFIGURE _IOC(_IOC_WRITE, 'k', 1, sizeof(struct config))
#define PERFORM   _IOC(_IOC_WRITE, 'k', 2, sizeof(struct request))
#define IMITATE   _IOC(_IOC_WRITE, 'k', 3, sizeof(int))
#define COUNT     _IOC(_IOC_WRITE, 'k', 4, sizeof(struct counters))

#define AT_SURFACE 0ul
#define AT_INTERFACE(n) (0xe000000000000000ul | (unsigned long)(n) << 12)

#define CHECK(what)                                                                        \
	do {                                                                               \
		if (!(what)) {                                                             \
			printf("line %d: %s is not so (%s)\n", __LINE__, #what, strerror(errno)); \
			exit(1);                                                           \
		}                                                                          \
	} while (0)

static void *map(int fd, size_t length, unsigned long offset)
{
	return mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
}

/* An exmap, its surface mapped before it has frames, as such programs do it. */
struct exmap {
	int fd;
	char *surface;
	size_t pages;
	union slot *slots[8];
};

static struct exmap make(size_t pages, int interfaces, size_t frames, int storage)
{
	struct exmap exmap = { .fd = open("/dev/exmap", O_RDWR), .pages = pages };
	struct config config = { storage, interfaces, frames, 0 };

	CHECK(exmap.fd >= 0);
	exmap.surface = map(exmap.fd, pages * PAGE, AT_SURFACE);
	CHECK(exmap.surface != MAP_FAILED);
	CHECK(map(exmap.fd, pages * PAGE, AT_SURFACE) == MAP_FAILED && errno == EBUSY);
	CHECK(ioctl(exmap.fd, CONFIGURE, &config) == 0);
	for (int i = 0; i < interfaces; i++) {
		exmap.slots[i] = map(exmap.fd, PAGE, AT_INTERFACE(i));
		CHECK(exmap.slots[i] != MAP_FAILED);
	}
	return exmap;
}

static int perform(int fd, int interface, int operation, unsigned int slots)
{
	struct request request = { .interface = (uint16_t)interface,
				   .slots = (uint16_t)slots,
				   .operation = (uint16_t)operation };

	return ioctl(fd, PERFORM, &request);
}

static struct counters count(int fd)
{
	struct counters counters;

	CHECK(ioctl(fd, COUNT, &counters) == 0);
	return counters;
}

struct worker {
	struct exmap *exmap;
	int number;
};

/* Fills a vector with pages of the worker's own, none beside another. */
static void choose(struct worker *worker, unsigned int round)
{
	for (unsigned int i = 0; i < SLOTS; i++) {
		union slot slot = { .page = (uint64_t)(i * 4 + worker->number + round % 3 * 2048),
				    .length = 1 };

		worker->exmap->slots[worker->number][i] = slot;
	}
}

static void *work(void *argument)
{
	struct worker *worker = argument;
	struct exmap *exmap = worker->exmap;
	union slot *slots = exmap->slots[worker->number];

	for (unsigned int round = 0; round < 30; round++) {
		choose(worker, round);
		CHECK(perform(exmap->fd, worker->number, DO_ALLOC, SLOTS) == 0);
		for (unsigned int i = 0; i < SLOTS; i++)
			CHECK(slots[i].result == 0 && slots[i].pages == 1);
		choose(worker, round);
		for (unsigned int i = 0; i < SLOTS; i++) {
			uint64_t *page = (uint64_t *)(exmap->surface + slots[i].page * PAGE);

			page[0] = page[511] = slots[i].page;
		}
		for (unsigned int i = 0; i < SLOTS; i++) {
			uint64_t *page = (uint64_t *)(exmap->surface + slots[i].page * PAGE);

			CHECK(page[0] == slots[i].page && page[511] == slots[i].page);
		}
		CHECK(perform(exmap->fd, worker->number, DO_FREE, SLOTS) == 0);
		for (unsigned int i = 0; i < SLOTS; i++)
			CHECK(slots[i].result == 0 && slots[i].pages == 1);
	}
	return NULL;
}

static void anonymous(void)
{
	struct exmap exmap = make(10000, 4, 4 * SLOTS, -1);
	struct worker workers[4];
	struct counters counters;
	pthread_t threads[4];

	for (int i = 0; i < 4; i++) {
		workers[i] = (struct worker){ &exmap, i };
		CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
	}
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	counters = count(exmap.fd);
	CHECK(counters.frames == 4 * SLOTS && counters.resident == 0 && counters.interfaces == 4);
	/* A page that is there is left as it is, which its count of pages tells. */
	exmap.slots[0][0] = (union slot){ .page = 77, .length = 2 };
	exmap.slots[0][1] = (union slot){ .page = 78, .length = 2 };
	CHECK(perform(exmap.fd, 0, DO_ALLOC, 2) == 0);
	CHECK(exmap.slots[0][0].pages == 2 && exmap.slots[0][1].pages == 1);
	CHECK(count(exmap.fd).resident == 3);
	CHECK(munmap(exmap.surface, exmap.pages * PAGE) == 0);
	CHECK(close(exmap.fd) == 0);
}

/* The offset of a call says which interface it is for, and what to do. */
static off_t call(int interface, int operation)
{
	return interface | operation << 8;
}

struct contender {
	struct exmap *exmap;
	int number;
	unsigned int won;
};

static void *contend(void *argument)
{
	struct contender *contender = argument;
	struct exmap *exmap = contender->exmap;

	for (unsigned int page = 1000; page < 1040; page++)
		contender->won += pread(exmap->fd, exmap->surface + page * PAGE, PAGE,
					call(contender->number, DO_ALLOC)) == (ssize_t)PAGE;
	return NULL;
}

/* Of two threads that ask for the same page, one is told that it has brought it. */
static void one_winner(struct exmap *exmap)
{
	struct contender contenders[2] = { { exmap, 0, 0 }, { exmap, 1, 0 } };
	pthread_t threads[2];

	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, contend, &contenders[i]) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(contenders[0].won + contenders[1].won == 40);
}

static void calls(void)
{
	struct exmap exmap = make(5000, 2, 100, -1);
	struct iovec parts[3] = {
		{ exmap.surface + 10 * PAGE, PAGE },
		{ exmap.surface + 510 * PAGE, 4 * PAGE },
		{ exmap.surface + 4999 * PAGE, PAGE },
	};

	CHECK(pread(exmap.fd, exmap.surface, PAGE, call(0, DO_ALLOC)) == (ssize_t)PAGE);
	exmap.surface[0] = 1;
	CHECK(preadv(exmap.fd, parts, 3, call(1, DO_ALLOC)) == 6 * (ssize_t)PAGE);
	exmap.surface[10 * PAGE] = exmap.surface[513 * PAGE] = exmap.surface[4999 * PAGE] = 1;
	CHECK(count(exmap.fd).resident == 7);
	/* Who asks for what is there has not won it. */
	CHECK(pread(exmap.fd, exmap.surface, PAGE, call(0, DO_ALLOC)) == 0);
	CHECK(pread(exmap.fd, exmap.surface, 3 * PAGE, call(0, DO_ALLOC)) == 0);
	CHECK(exmap.surface[0] == 1 && count(exmap.fd).resident == 9);
	/* A vector ends where something is there. */
	parts[0] = (struct iovec){ exmap.surface + 20 * PAGE, 2 * PAGE };
	parts[2] = (struct iovec){ exmap.surface + 30 * PAGE, PAGE };
	CHECK(preadv(exmap.fd, parts, 3, call(0, DO_ALLOC)) == 2 * (ssize_t)PAGE);
	CHECK(count(exmap.fd).resident == 11);
	one_winner(&exmap);
	CHECK(pread(exmap.fd, exmap.surface, 200 * PAGE, call(0, DO_ALLOC)) < 0);
	CHECK(count(exmap.fd).resident <= 100);
}

static void clones(void)
{
	struct exmap exmap = make(1000, 2, 100, -1);
	int private = open("/dev/exmap", O_RDWR), other = open("/dev/exmap", O_RDWR);

	CHECK(private >= 0 && other >= 0);
	CHECK(ioctl(private, IMITATE, exmap.fd) == 0);
	exmap.slots[1][0] = (union slot){ .page = 5, .length = 3 };
	CHECK(perform(private, 1, DO_ALLOC, 1) == 0 && exmap.slots[1][0].pages == 3);
	exmap.surface[5 * PAGE] = 7;
	CHECK(count(private).resident == 3 && count(exmap.fd).resident == 3);
	CHECK(ioctl(private, IMITATE, other) < 0);
	CHECK(ioctl(other, IMITATE, other) < 0);
	CHECK(ioctl(other, IMITATE, -1) < 0 && ioctl(other, IMITATE, 0) < 0);
	/* Each keeps the exmap on its own. */
	CHECK(close(exmap.fd) == 0);
	exmap.slots[0][0] = (union slot){ .page = 5, .length = 1 };
	CHECK(perform(private, 0, DO_FREE, 1) == 0 && exmap.slots[0][0].pages == 1);
	CHECK(ioctl(other, IMITATE, private) == 0);
	CHECK(close(private) == 0);
	CHECK(exmap.surface[6 * PAGE] == 0 && count(other).resident == 2);
}

static void errors(void)
{
	struct config config = { -1, 2, 100, 0 };
	struct exmap exmap;
	int fd = open("/dev/exmap", O_RDWR);

	CHECK(fd >= 0);
	/* Nothing is there yet. */
	CHECK(perform(fd, 0, DO_ALLOC, 1) < 0 && perform(fd, 0, DO_FREE, 512) < 0);
	CHECK(map(fd, PAGE, AT_INTERFACE(0)) == MAP_FAILED);
	CHECK(pread(fd, &config, sizeof(config), call(0, DO_ALLOC)) < 0);
	config.interfaces = 257;
	CHECK(ioctl(fd, CONFIGURE, &config) < 0);
	config.interfaces = -1;
	CHECK(ioctl(fd, CONFIGURE, &config) < 0);
	config = (struct config){ 9999, 2, 100, 0 };
	CHECK(ioctl(fd, CONFIGURE, &config) < 0);
	config = (struct config){ -1, 2, SIZE_MAX, 0 };
	CHECK(ioctl(fd, CONFIGURE, &config) < 0);
	CHECK(close(fd) == 0);

	exmap = make(1000, 2, 100, -1);
	config = (struct config){ -1, 2, 100, 0 };
	CHECK(ioctl(exmap.fd, CONFIGURE, &config) < 0);
	CHECK(perform(exmap.fd, 0, DO_ALLOC, 513) < 0 && perform(exmap.fd, 0, DO_ALLOC, 65535) < 0);
	CHECK(perform(exmap.fd, 2, DO_ALLOC, 1) < 0 && perform(exmap.fd, 65535, DO_FREE, 1) < 0);
	for (int operation = 4; operation < 65536; operation += 997)
		CHECK(perform(exmap.fd, 0, operation, 1) < 0);
	CHECK(map(exmap.fd, PAGE, AT_INTERFACE(2)) == MAP_FAILED);
	CHECK(pread(exmap.fd, exmap.surface, PAGE, call(2, DO_ALLOC)) < 0);
	CHECK(pread(exmap.fd, exmap.surface, PAGE, call(0, 9)) < 0);
	CHECK(pread(exmap.fd, exmap.surface + 999 * PAGE, 2 * PAGE, call(0, DO_ALLOC)) < 0);
	CHECK(pread(exmap.fd, exmap.surface - PAGE, PAGE, call(0, DO_ALLOC)) < 0);
	CHECK(pread(exmap.fd, exmap.surface + 1, PAGE, call(0, DO_ALLOC)) < 0);
	CHECK(pread(exmap.fd, &config, sizeof(config), call(0, DO_ALLOC)) < 0);
	/* There is nothing to be read from. */
	CHECK(pread(exmap.fd, exmap.surface, PAGE, call(0, DO_READ)) < 0);
	/* A range that ends outside, one that wraps around, and one without pages. */
	exmap.slots[0][0] = (union slot){ .page = 999, .length = 2 };
	exmap.slots[0][1] = (union slot){ .page = (1ul << 52) - 1, .length = 4095 };
	exmap.slots[0][2] = (union slot){ .page = 3, .length = 0 };
	exmap.slots[0][3] = (union slot){ .page = 3, .length = 1 };
	CHECK(perform(exmap.fd, 0, DO_ALLOC, 4) == 2);
	for (int i = 0; i < 3; i++) {
		CHECK(exmap.slots[0][i].result == (i < 2 ? -EFAULT : 0));
		CHECK(exmap.slots[0][i].pages == 0);
	}
	CHECK(exmap.slots[0][3].result == 0 && exmap.slots[0][3].pages == 1);
	CHECK(count(exmap.fd).resident == 1);
}

/* Writes a page of the surface to its place in storage, as vmcache does. */
static void write_back(int storage, char *surface, const unsigned int *pages, unsigned int count)
{
	struct iocb requests[64], *pointers[64];
	struct io_event events[64];
	aio_context_t context = 0;

	CHECK(syscall(SYS_io_setup, 64, &context) == 0);
	for (unsigned int i = 0; i < count; i++) {
		requests[i] = (struct iocb){
			.aio_lio_opcode = IOCB_CMD_PWRITE,
			.aio_fildes = (uint32_t)storage,
			.aio_buf = (uint64_t)(surface + pages[i] * PAGE),
			.aio_nbytes = PAGE,
			.aio_offset = (int64_t)(pages[i] * PAGE),
		};
		pointers[i] = &requests[i];
	}
	CHECK(syscall(SYS_io_submit, context, (long)count, pointers) == (long)count);
	CHECK(syscall(SYS_io_getevents, context, (long)count, (long)count, events, NULL) ==
	      (long)count);
	for (unsigned int i = 0; i < count; i++)
		CHECK(events[i].res == (int64_t)PAGE);
	CHECK(syscall(SYS_io_destroy, context) == 0);
}

static void storage(const char *path)
{
	int device = open(path, O_RDWR | O_DIRECT);
	const unsigned int pages[] = { 3, 4, 700, 1999, 512, 511 };
	const unsigned int count_of = sizeof(pages) / sizeof(*pages);
	struct exmap exmap;
	struct iovec parts[3];

	CHECK(device >= 0);
	exmap = make(2000, 2, 64, device);
	/* A page by one, and it is written back. */
	for (unsigned int i = 0; i < count_of; i++) {
		char *page = exmap.surface + pages[i] * PAGE;

		CHECK(pread(exmap.fd, page, PAGE, call(0, DO_READ)) == (ssize_t)PAGE);
		memset(page, (int)('a' + i), PAGE);
	}
	write_back(device, exmap.surface, pages, count_of);
	for (unsigned int i = 0; i < count_of; i++)
		exmap.slots[0][i] = (union slot){ .page = pages[i], .length = 1 };
	CHECK(perform(exmap.fd, 0, DO_FREE, count_of) == 0 && count(exmap.fd).resident == 0);
	/* It is what is read next, in one call. */
	parts[0] = (struct iovec){ exmap.surface + 3 * PAGE, 2 * PAGE };
	parts[1] = (struct iovec){ exmap.surface + 511 * PAGE, 2 * PAGE };
	CHECK(preadv(exmap.fd, parts, 2, call(1, DO_READ)) == 4 * (ssize_t)PAGE);
	CHECK(exmap.surface[3 * PAGE] == 'a' && exmap.surface[5 * PAGE - 1] == 'b');
	CHECK(exmap.surface[511 * PAGE] == 'f' && exmap.surface[513 * PAGE - 1] == 'e');
	CHECK(pread(exmap.fd, exmap.surface + 1999 * PAGE, PAGE, call(1, DO_READ)) ==
	      (ssize_t)PAGE);
	CHECK(exmap.surface[1999 * PAGE + 17] == 'd');
	CHECK(count(exmap.fd).resident == 5);
	/* A page that is there is another thread's, whose changes must stay. */
	exmap.surface[3 * PAGE] = 'z';
	CHECK(pread(exmap.fd, exmap.surface + 3 * PAGE, PAGE, call(0, DO_READ)) == 0);
	CHECK(exmap.surface[3 * PAGE] == 'z' && count(exmap.fd).resident == 5);
	/* A vector ends there, and tells what it has brought before. */
	parts[0] = (struct iovec){ exmap.surface + 700 * PAGE, PAGE };
	parts[1] = (struct iovec){ exmap.surface + 3 * PAGE, PAGE };
	parts[2] = (struct iovec){ exmap.surface + 20 * PAGE, PAGE };
	CHECK(preadv(exmap.fd, parts, 3, call(0, DO_READ)) == (ssize_t)PAGE);
	CHECK(exmap.surface[3 * PAGE] == 'z' && exmap.surface[700 * PAGE] == 'c');
	CHECK(count(exmap.fd).resident == 6);
}

int main(int count_of_arguments, char **arguments)
{
	const char *what = count_of_arguments > 1 ? arguments[1] : "";

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(what, "anonymous"))
		anonymous();
	else if (!strcmp(what, "calls"))
		calls();
	else if (!strcmp(what, "clones"))
		clones();
	else if (!strcmp(what, "errors"))
		errors();
	else if (!strcmp(what, "storage") && count_of_arguments == 3)
		storage(arguments[2]);
	else
		return 2;
	return 0;
}
