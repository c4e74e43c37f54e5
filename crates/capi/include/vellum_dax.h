/*
 * Files on byte-addressable storage, mapped without a fault for each page.
 *
 * This header is the manual of libvellum. Link with -lvellum.
 *
 * With Vellum's kernel module, on ext4 that is mounted with -o dax, a file has a table: its page
 * tables, made once for all processes. A mapping costs one entry for each GiB, and only the first
 * access faults. Without the module, or on other storage, the same functions use mmap;
 * vellum_dax_backend() says which, and vellum_dax_why_no_table() says why.
 *
 *     vellum_dax *file;
 *     vellum_dax_mapping *mapping;
 *     uint32_t flags = VELLUM_DAX_WRITE | VELLUM_DAX_CREATE;
 *     int error = vellum_dax_open("/mnt/pmem/log", flags, NULL, &file);
 *     if (error)
 *         errx(1, "%s", vellum_dax_last_error());
 *     error = vellum_dax_extend(file, 1 << 20);
 *     if (!error)
 *         error = vellum_dax_map(file, VELLUM_DAX_READ_WRITE, &mapping);
 *     if (!error) {
 *         error = vellum_dax_write_durably(mapping, 0, "hello", 5);
 *         vellum_dax_unmap(mapping);
 *     }
 *     vellum_dax_close(file);
 *
 * Errors. A function that returns int returns 0 or a negative errno value. Every function returns
 * -EINVAL for invalid arguments, NULL among them, and what the system said. Each function lists its
 * other errors. vellum_dax_last_error() returns the same error in words, and says what to do. After
 * an error a function has made nothing and has not written its result.
 *
 * Handles. The caller frees each handle exactly once, with the function that is named at its type,
 * and no thread uses the handle during or after that call. Otherwise several threads may use one
 * handle at the same time. Handles may be freed in any order: a mapping needs neither its file's
 * handle nor its heap's.
 *
 * What a mapping shows is the file. Other processes may write it at any time. An access to a page
 * that the file has lost meanwhile is SIGBUS.
 *
 * Descriptors. A function that takes a descriptor works on a duplicate; the caller keeps its own.
 *
 * Offsets and lengths are in bytes. Linux 5.10 and later, pages of 4 KiB.
 */
#ifndef VELLUM_DAX_H
#define VELLUM_DAX_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open file. Freed by vellum_dax_close(). */
typedef struct vellum_dax vellum_dax;

/* A file in the address space. Freed by vellum_dax_unmap(). */
typedef struct vellum_dax_mapping vellum_dax_mapping;

/* Addresses for ephemeral mappings. Freed by vellum_dax_heap_close(). */
typedef struct vellum_dax_heap vellum_dax_heap;

/* A part of a file in a heap. Freed by vellum_dax_ephemeral_unmap(). */
typedef struct vellum_dax_ephemeral vellum_dax_ephemeral;

/* A folder of zeroed files. Freed by vellum_dax_pool_close(). */
typedef struct vellum_dax_pool vellum_dax_pool;

/* Backends. */
#define VELLUM_DAX_AUTO  0u /* the best that the file can have */
#define VELLUM_DAX_TABLE 1u /* a file table of Vellum's module */
#define VELLUM_DAX_MMAP  2u /* mmap: a fault for each page */

/* Access to a mapping. */
#define VELLUM_DAX_READ       0u
#define VELLUM_DAX_READ_WRITE 1u

/* Who makes stores durable. */
#define VELLUM_DAX_SYNCED  0u /* vellum_dax_sync(), as fsync would */
#define VELLUM_DAX_FLUSHED 1u /* the program, by vellum_dax_persist() or vellum_dax_write_durably() */

/* Flags of vellum_dax_open(). */
#define VELLUM_DAX_WRITE  1u /* open for reading and writing; without it for reading */
#define VELLUM_DAX_CREATE 2u /* make the file if it is not there; with WRITE only */

/* How a file is opened. NULL where a function takes one: all members 0. */
struct vellum_dax_options {
	uint32_t backend;
	uint32_t durability;
};

/* A table's figures. */
struct vellum_dax_stat {
	uint64_t pages;          /* of the file, that the table was made for */
	uint64_t present;        /* pages that no access faults in */
	uint64_t table_bytes;    /* that page tables take, once for all processes */
	uint64_t mappings;       /* of all processes */
	uint64_t served_by_file; /* mappings that the file system serves for now, page by page */
	uint64_t ephemeral;      /* ephemeral mappings, with those that wait for a flush */
	uint32_t is_stale;       /* 1: the file has lost blocks since the table was refreshed */
	uint32_t reserved;       /* 0 */
};

/*
 * The reason for the last failed call of this thread, and what to do: UTF-8, "" before the first
 * failure. Valid until the next failed call of this thread, or until the thread ends. Never NULL.
 */
const char *vellum_dax_last_error(void);

/*
 * Opens a file. `options` may be NULL.
 *
 * -EOPNOTSUPP  the options ask for a table, and the file cannot have one
 * -ENOENT, -EACCES
 */
int vellum_dax_open(const char *path, uint32_t flags, const struct vellum_dax_options *options,
		    vellum_dax **result);

/* The same for a descriptor that is open for reading, and perhaps for writing. */
int vellum_dax_from_fd(int fd, const struct vellum_dax_options *options, vellum_dax **result);

/* Frees the handle. Mappings stay. NULL is ignored. */
void vellum_dax_close(vellum_dax *file);

/* VELLUM_DAX_TABLE or VELLUM_DAX_MMAP; 0 for NULL. */
uint32_t vellum_dax_backend(const vellum_dax *file);

/* Why the file has no table, and what to do, as the error of this thread; 0 if it has one. */
int vellum_dax_why_no_table(const vellum_dax *file);

/* Bytes of the file. */
int vellum_dax_length(const vellum_dax *file, uint64_t *result);

/*
 * Appends bytes, which mappings show at once, and says where they begin (`offset` may be NULL). No
 * other thread or process may append at the same time.
 *
 * -EACCES  the file is open for reading
 * -ENOSPC
 */
int vellum_dax_append(const vellum_dax *file, const void *bytes, size_t length, uint64_t *offset);

/*
 * Makes the file longer, by zeros whose blocks exist: a store to them needs no fault. Does nothing
 * if the file is as long. Errors of vellum_dax_append().
 */
int vellum_dax_extend(const vellum_dax *file, uint64_t length);

/* Brings the table up to date with a file that other programs change. For speed alone. */
int vellum_dax_refresh(const vellum_dax *file);

/*
 * Makes durable what was stored through mappings, by any process, and written by calls. Does nothing
 * for a table with VELLUM_DAX_FLUSHED. After an error of the device what was stored may be lost.
 */
int vellum_dax_sync(const vellum_dax *file);

/* The table's figures. -EOPNOTSUPP: the file has no table. */
int vellum_dax_get_stat(const vellum_dax *file, struct vellum_dax_stat *result);

/*
 * Maps all of the file, and room for as much again, so that the mapping shows what is appended. With
 * a table that is a GiB at least, which costs address space and no memory.
 *
 * -EACCES  the file is open for reading, and the mapping is to write
 * -EFBIG   longer than a mapping can be
 * -ENOMEM
 */
int vellum_dax_map(const vellum_dax *file, uint32_t access, vellum_dax_mapping **result);

/* Unmaps, and frees the handle. NULL is ignored. */
void vellum_dax_unmap(vellum_dax_mapping *mapping);

/* Its first address, the same for its whole life; NULL for NULL. */
void *vellum_dax_mapping_base(const vellum_dax_mapping *mapping);

/* Bytes of the file that it shows now. */
int vellum_dax_mapping_length(const vellum_dax_mapping *mapping, uint64_t *result);

/*
 * Copies bytes into a mapping, past the CPU's caches, so that they survive a loss of power when this
 * returns. On storage that is not byte-addressable, and for VELLUM_DAX_SYNCED, it calls msync.
 *
 * -EINVAL  the range is not within what the mapping shows
 * -EACCES  the mapping is for reading
 */
int vellum_dax_write_durably(const vellum_dax_mapping *mapping, uint64_t offset, const void *bytes,
			     size_t length);

/* Makes a range durable that the program has stored to. Errors of vellum_dax_write_durably(). */
int vellum_dax_persist(const vellum_dax_mapping *mapping, uint64_t offset, size_t length);

/*
 * Opens a heap: addresses for files that are mapped for a short time, without a VMA, the mmap lock
 * or a TLB flush for each. `capacity` is in bytes, 0 for the default; `batch` unmapped files share
 * a flush, 1 to 512, 0 for the default of 33.
 *
 * -EOPNOTSUPP  `backend` is VELLUM_DAX_TABLE, and the machine has no module
 */
int vellum_dax_heap_open(uint32_t backend, uint32_t access, uint64_t capacity, uint32_t batch,
			 vellum_dax_heap **result);

/* Frees the handle. Files stay mapped until they are unmapped. NULL is ignored. */
void vellum_dax_heap_close(vellum_dax_heap *heap);

/* VELLUM_DAX_TABLE or VELLUM_DAX_MMAP; 0 for NULL. */
uint32_t vellum_dax_heap_backend(const vellum_dax_heap *heap);

/* Flushes what was unmapped: no CPU reaches these files any more when this returns. */
int vellum_dax_heap_flush(const vellum_dax_heap *heap);

/*
 * Maps all of a file, as long as it is now, with the rights of the heap.
 *
 * -EACCES  the heap writes, and the file is open for reading
 * -EFBIG   longer than a mapping can be
 * -ENOMEM
 */
int vellum_dax_heap_map(const vellum_dax_heap *heap, int fd, vellum_dax_ephemeral **result);

/*
 * Maps a range of a file. It may end after the file: an access there is SIGBUS. Errors of
 * vellum_dax_heap_map().
 */
int vellum_dax_heap_map_range(const vellum_dax_heap *heap, int fd, uint64_t offset, uint64_t length,
			      vellum_dax_ephemeral **result);

/* Unmaps, and frees the handle. NULL is ignored. */
void vellum_dax_ephemeral_unmap(vellum_dax_ephemeral *ephemeral);

/* The address of its first byte, which may not be accessed if there is none; NULL for NULL. */
void *vellum_dax_ephemeral_base(const vellum_dax_ephemeral *ephemeral);

/* Its bytes; 0 for NULL. */
size_t vellum_dax_ephemeral_length(const vellum_dax_ephemeral *ephemeral);

/* Makes durable what was stored to the file. */
int vellum_dax_ephemeral_sync(const vellum_dax_ephemeral *ephemeral);

/*
 * Opens a pool of zeroed files, and makes the folder if it is not there. `vellum dax prezero FOLDER`
 * zeroes its files in the background.
 *
 * -EINVAL  the folder does not belong to this user alone, or has other files
 */
int vellum_dax_pool_open(const char *folder, vellum_dax_pool **result);

/* Frees the handle. NULL is ignored. */
void vellum_dax_pool_close(vellum_dax_pool *pool);

/*
 * Makes a file of zeros of that length. If the pool has one, nothing is zeroed here. `options` may
 * be NULL.
 *
 * -EEXIST  there is such a file
 * -EXDEV   the pool is on another file system
 * -ENOSPC
 */
int vellum_dax_pool_create(const vellum_dax_pool *pool, const char *path, uint64_t length,
			   const struct vellum_dax_options *options, vellum_dax **result);

/*
 * The same, but a file that is there is replaced, in one step for other processes. Processes that
 * have it open keep it.
 */
int vellum_dax_pool_replace(const vellum_dax_pool *pool, const char *path, uint64_t length,
			    const struct vellum_dax_options *options, vellum_dax **result);

#ifdef __cplusplus
}
#endif

#endif
