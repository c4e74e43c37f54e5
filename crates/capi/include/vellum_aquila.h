/*
 * Mapped files whose page faults, cache and write-back are the program's own.
 *
 * This header is the manual of libvellum. Link with -lvellum.
 *
 * A cache has a budget, a policy and statistics. A mapping is a part of a file in memory: loads and
 * stores are as with mmap, and a page that is not in the cache is read when it is accessed. The
 * program can say what it will need, what it no longer needs, and what must be durable.
 *
 *     struct vellum_aquila_options options = { .size = 256 << 20 };
 *     vellum_aquila *cache;
 *     vellum_aquila_mapping *mapping;
 *     int fd = open("graph.bin", O_RDONLY);
 *     if (vellum_aquila_open(&options, &cache) ||
 *         vellum_aquila_map(cache, fd, 0, 0, VELLUM_AQUILA_READ, &mapping))
 *         errx(1, "%s", vellum_aquila_last_error());
 *     vellum_aquila_advise(mapping, VELLUM_AQUILA_RANDOM);
 *     const uint32_t *edges = vellum_aquila_mapping_base(mapping);
 *     ...
 *     vellum_aquila_unmap(mapping);
 *     vellum_aquila_close(cache);
 *
 * Errors. A function that returns int returns 0 or a negative errno value. Every function returns
 * -EINVAL for invalid arguments, NULL among them, and what the system said. Each function lists its
 * other errors. vellum_aquila_last_error() returns the same error in words, and says what to do.
 * After an error a function has made nothing and has not written its result.
 *
 * Handles. The caller frees each handle exactly once, with the function that is named at its type,
 * and no thread uses the handle during or after that call. Otherwise several threads may use one
 * handle at the same time. Handles may be freed in any order: a cache lives as long as its last
 * mapping, and a mapping as long as its last pin.
 *
 * Faults. VELLUM_AQUILA_SIGNAL handles a fault in a handler of SIGBUS on the thread that made it. A
 * program that handles SIGBUS itself installs its handler before it opens the first cache. A thread
 * that faults must not block SIGBUS, and needs 32 KiB of its stack. A system call that is given an
 * address of a page that is not mapped fails with EFAULT: pin the range first. With
 * VELLUM_AQUILA_MONITOR threads of the cache handle faults, also those of system calls; that needs
 * Linux 6.6, and CAP_SYS_PTRACE, access to /dev/userfaultfd, or vm.unprivileged_userfaultfd = 1.
 *
 * The file. What the program does to it by other ways (write) is not seen in pages that are in the
 * cache. A kill may lose any change that was not synced. A forked child does not have the mappings.
 *
 * Descriptors. A function that takes a descriptor works on a duplicate; the caller keeps its own.
 * The process loses its locks on a file (fcntl, F_SETLK) when the last mapping of the file ends.
 *
 * Offsets and lengths are in bytes. Linux 5.14 and later, pages of 4 KiB; before that, and where
 * userfaultfd is forbidden, the same functions use mmap.
 */
#ifndef VELLUM_AQUILA_H
#define VELLUM_AQUILA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A cache of file pages. Freed by vellum_aquila_close(). */
typedef struct vellum_aquila vellum_aquila;

/* A part of a file in the address space. Freed by vellum_aquila_unmap(). */
typedef struct vellum_aquila_mapping vellum_aquila_mapping;

/* Pages that stay in memory and mapped. Freed by vellum_aquila_unpin(). */
typedef struct vellum_aquila_pin vellum_aquila_pin;

/* Backends. */
#define VELLUM_AQUILA_AUTO        0u /* the best that works here */
#define VELLUM_AQUILA_USERFAULTFD 1u /* the cache handles the faults */
#define VELLUM_AQUILA_KERNEL      2u /* mmap, without a budget and a policy */

/* Which pages leave first. */
#define VELLUM_AQUILA_S3_FIFO 0u /* a scan does not drive other pages out */
#define VELLUM_AQUILA_CLOCK   1u
#define VELLUM_AQUILA_LRU     2u /* the least recently faulted, roughly */

/* Which threads handle faults: see above. */
#define VELLUM_AQUILA_SIGNAL  0u
#define VELLUM_AQUILA_MONITOR 1u

/* Access to a mapping, and to pinned pages. */
#define VELLUM_AQUILA_READ       0u /* a store is SIGSEGV */
#define VELLUM_AQUILA_READ_WRITE 1u

/* How the program will access a mapping, which decides how much a fault reads. */
#define VELLUM_AQUILA_NORMAL     0u
#define VELLUM_AQUILA_RANDOM     1u /* one page */
#define VELLUM_AQUILA_SEQUENTIAL 2u

/* How a cache is made. */
struct vellum_aquila_options {
	uint64_t size;      /* bytes of the cache: 256 KiB at least */
	uint64_t capacity;  /* to which it can grow; less than `size`: it cannot */
	uint32_t backend;
	uint32_t policy;
	uint32_t faults;
	uint32_t direct_io; /* 1: read and write past the kernel's page cache */
};

/* What a cache has done since it was made, and what is in it. */
struct vellum_aquila_statistics {
	uint64_t faults;          /* that the cache handled */
	uint64_t hits;            /* faults, and other requests for a page, that found it */
	uint64_t misses;          /* those that read it from the file */
	uint64_t read_ahead;      /* pages that were read because they follow one that was asked for */
	uint64_t read_ahead_hits; /* those of them that the program used, as far as the cache knows */
	uint64_t evictions;       /* pages that left */
	uint64_t written_back;    /* pages that were written to their files */
	uint64_t writes;          /* calls that wrote them */
	uint64_t write_errors;    /* such calls that failed */
	uint64_t dirty;           /* pages that are known to be dirty now */
	uint64_t frames;          /* pages that the cache may have */
};

/*
 * The reason for the last failed call of this thread, and what to do: UTF-8, "" before the first
 * failure. Valid until the next failed call of this thread, or until the thread ends. Never NULL.
 */
const char *vellum_aquila_last_error(void);

/*
 * Makes a cache.
 *
 * -EINVAL      less than 256 KiB, or more than 4 TiB
 * -EOPNOTSUPP  the backend that was asked for does not work here
 * -ENOMEM
 */
int vellum_aquila_open(const struct vellum_aquila_options *options, vellum_aquila **result);

/* Frees the handle. Mappings stay, and with them the cache. NULL is ignored. */
void vellum_aquila_close(vellum_aquila *cache);

/* VELLUM_AQUILA_USERFAULTFD or VELLUM_AQUILA_KERNEL; 0 for NULL. */
uint32_t vellum_aquila_backend(const vellum_aquila *cache);

/* Why the kernel has the cache, and what to do, as the error of this thread; 0 if it has not. */
int vellum_aquila_why_not_better(const vellum_aquila *cache);

/*
 * Makes the cache larger, up to its capacity, or smaller, by evicting pages.
 *
 * -EBUSY       too many pages are pinned
 * -EOPNOTSUPP  the kernel has the cache
 */
int vellum_aquila_resize(const vellum_aquila *cache, uint64_t size);

/*
 * Changes the length of a file, mapped or not. An access to pages beyond it is SIGBUS afterwards.
 *
 * -EACCES  the descriptor is open for reading only
 * -EBUSY   pages beyond the new end are pinned
 */
int vellum_aquila_set_length(const vellum_aquila *cache, int fd, uint64_t length);

/* -EOPNOTSUPP: the kernel has the cache, and counts for the whole machine only. */
int vellum_aquila_get_statistics(const vellum_aquila *cache,
				 struct vellum_aquila_statistics *result);

/*
 * Maps `length` bytes of a file from a multiple of 4096 on; 0: to its present end. It may go beyond
 * the end: pages there are accessible as soon as the file has them.
 *
 * -EACCES  the descriptor is not open for reading, or for writing if the mapping is for that
 * -ENODEV  not a regular file, or one without a length (/proc)
 * -EMFILE  too many mappings, or files
 * -EFBIG   the mapping ends beyond the process' limit of file sizes
 * -ENOMEM
 */
int vellum_aquila_map(const vellum_aquila *cache, int fd, uint64_t offset, uint64_t length,
		      uint32_t access, vellum_aquila_mapping **result);

/*
 * Makes all changes durable, unmaps, and frees the handle, also when that fails. NULL is ignored.
 * Errors of vellum_aquila_sync(): what could not be written is lost, if this was the last mapping
 * of the file.
 */
int vellum_aquila_unmap(vellum_aquila_mapping *mapping);

/* Its first address, the same for its whole life; NULL for NULL. */
void *vellum_aquila_mapping_base(const vellum_aquila_mapping *mapping);

/* Its bytes; 0 for NULL. */
size_t vellum_aquila_mapping_length(const vellum_aquila_mapping *mapping);

/* Says how the program will access it. */
int vellum_aquila_advise(const vellum_aquila_mapping *mapping, uint32_t advice);

/*
 * Reads a range into the cache and maps it, in few calls: no more pages than the cache has. `pages`
 * (may be NULL) gets how many it mapped.
 */
int vellum_aquila_prefetch(const vellum_aquila_mapping *mapping, size_t offset, size_t length,
			   uint64_t *pages);

/*
 * Evicts a range, and writes back what is dirty of it. Pinned pages stay. `pages` (may be NULL) gets
 * how many left; 0 if the kernel has the cache. After an error the pages are still there.
 */
int vellum_aquila_evict(const vellum_aquila_mapping *mapping, size_t offset, size_t length,
			uint64_t *pages);

/*
 * Writes the dirty pages of a range to the file. What could not be written is still dirty.
 *
 * -ENOSPC
 */
int vellum_aquila_write_back(const vellum_aquila_mapping *mapping, size_t offset, size_t length);

/*
 * Makes all stores durable that happened before the call.
 *
 * -ENOSPC
 * -EIO     an earlier sync of the file failed, and what was written then may be lost
 */
int vellum_aquila_sync(const vellum_aquila_mapping *mapping);

/*
 * Copies bytes out of a mapping, without a fault.
 *
 * -ENXIO  the file ends before that
 */
int vellum_aquila_read(const vellum_aquila_mapping *mapping, size_t offset, void *bytes,
		       size_t length);

/* Copies bytes into a mapping. -ENXIO as above; -EACCES: the mapping is for reading. */
int vellum_aquila_write(const vellum_aquila_mapping *mapping, size_t offset, const void *bytes,
			size_t length);

/*
 * Pins the pages of a range: they stay in memory and mapped, so that system calls may use them. For
 * a call that stores (read), pin with VELLUM_AQUILA_READ_WRITE.
 *
 * -EACCES     the mapping is for reading, and the pin is for writing
 * -EBUSY      every page of the cache is pinned
 * -EOVERFLOW  a page has 32768 pins
 * -ENXIO      the file ends before that
 */
int vellum_aquila_pin_pages(const vellum_aquila_mapping *mapping, size_t offset, size_t length,
			    uint32_t access, vellum_aquila_pin **result);

/* Frees the handle, and lets the pages leave. NULL is ignored. */
void vellum_aquila_unpin(vellum_aquila_pin *pin);

#ifdef __cplusplus
}
#endif

#endif
