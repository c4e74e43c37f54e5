/*
 * Morsels: memory objects that processes mount as a whole.
 *
 * This header is the manual of libvellum. Link with -lvellum.
 *
 * A Morsel is memory that has a file descriptor. One process makes it, fills it and seals its
 * content; others receive the descriptor, or open it by name, and map all of it. With Vellum's
 * kernel module a mapping costs one page-table entry, however large the Morsel is, and all mappings
 * share the page tables below it. Without the module a Morsel is a sealed memfd: processes share the
 * memory but not the page tables, and functions that need the module return -EOPNOTSUPP.
 *
 *     struct vellum_morsel_shape shape = { .length = 10000 };
 *     vellum_morsel *morsel;
 *     vellum_morsel_mapping *mapping;
 *     int error = vellum_morsel_create(VELLUM_MORSEL_AUTO, &shape, &morsel);
 *     if (error)
 *         errx(1, "%s", vellum_morsel_last_error());
 *     error = vellum_morsel_map(morsel, VELLUM_MORSEL_READ_WRITE, 0, &mapping);
 *     if (!error) {
 *         memcpy(vellum_morsel_mapping_base(mapping), "hello", 5);
 *         vellum_morsel_unmap(mapping);
 *     }
 *     vellum_morsel_close(morsel);
 *
 * Errors. A function that returns int returns 0 or a negative errno value. Every function returns
 * -EINVAL for invalid arguments, NULL among them. Each function lists its other errors.
 * vellum_morsel_last_error() returns the same error in words, and says what to do. After an error a
 * function has made nothing and has not written its result, unless its comment says otherwise.
 *
 * Handles. The caller frees each handle exactly once, with vellum_morsel_close() or
 * vellum_morsel_unmap(), and no thread uses the handle during or after that call. Otherwise several
 * threads may use one handle at the same time. A mapping does not need its Morsel's handle: the
 * memory lives as long as a descriptor, a mapping or a name of it, in any process.
 *
 * Descriptors. A function that takes a descriptor works on a duplicate; the caller keeps its own.
 *
 * Offsets and lengths are in bytes. Linux 5.10 and later, pages of 4 KiB.
 */
#ifndef VELLUM_MORSEL_H
#define VELLUM_MORSEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A handle of a Morsel: a descriptor that the library has checked. */
typedef struct vellum_morsel vellum_morsel;

/* A Morsel in the address space of this process. */
typedef struct vellum_morsel_mapping vellum_morsel_mapping;

/* Backends. */
#define VELLUM_MORSEL_AUTO   0u /* the best that this machine offers */
#define VELLUM_MORSEL_KERNEL 1u /* Vellum's module: shared page tables, names */
#define VELLUM_MORSEL_MEMFD  2u /* a sealed memfd, on every kernel */

/* Access to a Morsel. */
#define VELLUM_MORSEL_READ       0u
#define VELLUM_MORSEL_READ_WRITE 1u

/* Seals. A seal is permanent. */
#define VELLUM_MORSEL_SEAL_CONTENT    1u /* no writing, filling, punching, mapping for writing */
#define VELLUM_MORSEL_SEAL_POPULATION 2u /* holes stay, access to one is SIGBUS; needs the module */

/* Flags of a shape. */
#define VELLUM_MORSEL_HUGE     1u /* pages of 2 MiB where the kernel has them; order 2 and above */
#define VELLUM_MORSEL_PINNABLE 2u /* devices may pin its pages: direct I/O; not with HUGE */
#define VELLUM_MORSEL_INHERIT  4u /* a forked child keeps mappings; otherwise it loses them */

/* The fixed properties of a Morsel. Each member says what 0 means. */
struct vellum_morsel_shape {
	uint64_t length;  /* at most the extent; 0: the whole extent of the order */
	uint64_t address; /* where all processes map it, a multiple of its extent; 0: anywhere */
	uint32_t order;   /* the extent is 512^order pages; up to 4; 0: the smallest that fits */
	uint32_t flags;
};

/* The state of a Morsel. A count is -1 if the backend does not know it. */
struct vellum_morsel_stat {
	struct vellum_morsel_shape shape;
	uint32_t backend; /* VELLUM_MORSEL_KERNEL or VELLUM_MORSEL_MEMFD */
	uint32_t seals;
	uint64_t pages;   /* pages of 4 KiB that have memory */
	int64_t huge;     /* entries of 2 MiB; `pages` includes their pages */
	int64_t tables;   /* pages that its page tables take */
	int64_t mounts;   /* mappings, in all processes */
};

/*
 * The reason for the last failed call of this thread, and what to do: UTF-8, "" before the first
 * failure. Valid until the next failed call of this thread, or until the thread ends. Never NULL.
 */
const char *vellum_morsel_last_error(void);

/*
 * Makes a Morsel without a name. The Morsel has no memory yet, and reads as zeros.
 *
 * -EINVAL  no Morsel can have this shape
 * -ENODEV  this machine does not have the backend
 * -ENOSPC, -ENOMEM, -EACCES
 */
int vellum_morsel_create(uint32_t backend, const struct vellum_morsel_shape *shape,
			 vellum_morsel **result);

/*
 * Makes a Morsel with a name: 1 to 255 bytes of UTF-8 without '/'. Only its owner may open it.
 *
 * Errors of vellum_morsel_create(), and
 * -EEXIST      the name is taken
 * -EOPNOTSUPP  without the module there are no names
 */
int vellum_morsel_create_named(const char *name, const struct vellum_morsel_shape *shape,
			       vellum_morsel **result);

/*
 * Opens a Morsel by its name, for reading, or for reading and writing.
 *
 * -ENOENT      no Morsel has this name
 * -EACCES      its mode forbids it
 * -EOPNOTSUPP  without the module there are no names
 */
int vellum_morsel_open(const char *name, uint32_t access, vellum_morsel **result);

/* Removes a name. The Morsel lives until its last user ends. Errors of vellum_morsel_open(). */
int vellum_morsel_unlink(const char *name);

/*
 * Asks the cache daemon for the Morsel of a file, which is open for reading. The daemon's socket is
 * at $VELLUM_MORSELD or /run/vellum/morseld.sock. The daemon reads the file once for all processes,
 * and seals the content. The call waits while the daemon loads the file.
 *
 * -ENOENT, -ECONNREFUSED, -EACCES  no daemon answers, or this user may not ask it
 * -ECANCELED                       the daemon refused; the message says why
 * -ECONNRESET, -EPROTO             the daemon ended, or another program answers at the socket
 */
int vellum_morsel_of_file(int file, vellum_morsel **result);

/*
 * The Morsel of a descriptor. The descriptor may come from an untrusted process.
 *
 * -EBADF   the number is not an open descriptor
 * -EINVAL  the descriptor is not that of a Morsel, or its file could be truncated
 */
int vellum_morsel_from_fd(int fd, vellum_morsel **result);

/* Sends a Morsel through a Unix stream socket. The receiver gets the rights of this handle. */
int vellum_morsel_send(const vellum_morsel *morsel, int socket);

/*
 * Waits for a Morsel from the other end of a Unix stream socket, and receives it. The sender need
 * not be trusted.
 *
 * -EINVAL  the sender sent something else, or has closed the socket
 */
int vellum_morsel_receive(int socket, vellum_morsel **result);

/* Makes another handle of the same Morsel, which cannot change it. Needs /proc. */
int vellum_morsel_read_only(const vellum_morsel *morsel, vellum_morsel **result);

/* Frees a handle. Does nothing with NULL. */
void vellum_morsel_close(vellum_morsel *morsel);

/* Its length; 0 of NULL. */
uint64_t vellum_morsel_length(const vellum_morsel *morsel);

/* Its descriptor, which the handle keeps and closes; -EINVAL of NULL. */
int vellum_morsel_fd(const vellum_morsel *morsel);

/* The state of a Morsel at this moment. -EIO if it was revoked. */
int vellum_morsel_get_stat(const vellum_morsel *morsel, struct vellum_morsel_stat *result);

/*
 * Populates whole pages that have no memory; they read as zeros. A range that ends at the end of the
 * Morsel may end in the middle of a page.
 *
 * -EINVAL  the range is not within the Morsel, or does not consist of whole pages
 * -EACCES  the handle is for reading only
 * -EPERM   the population is sealed
 * -EIO     the Morsel was revoked
 * -ENOSPC, -ENOMEM
 */
int vellum_morsel_populate(const vellum_morsel *morsel, uint64_t offset, uint64_t length);

/*
 * Releases the memory of whole pages, which then read as zeros. Errors of vellum_morsel_populate(),
 * but -EPERM if the content is sealed.
 */
int vellum_morsel_punch(const vellum_morsel *morsel, uint64_t offset, uint64_t length);

/*
 * Reads `length` bytes of a file, from its byte `from` on, to `offset`, a multiple of 4096. Reads
 * fewer bytes if the file ends. Puts their number into `filled`, unless that is NULL. Bytes that were
 * read before an error stay.
 *
 * Errors of vellum_morsel_populate(), those of reading the file, and
 * -EPERM    the content is sealed
 * -ENODATA  the file ends before `from`
 * -EINVAL   the file has no offsets (a pipe, for example), or is not open for reading
 */
int vellum_morsel_fill(const vellum_morsel *morsel, int file, uint64_t from, uint64_t offset,
		       uint64_t length, uint64_t *filled);

/*
 * Seals a Morsel.
 *
 * -EBUSY       a process has it mapped for writing, or does I/O into it
 * -EACCES      the handle is for reading only
 * -EOPNOTSUPP  the population, without the module
 */
int vellum_morsel_seal(const vellum_morsel *morsel, uint32_t seals);

/*
 * Revokes a Morsel: takes its memory from all processes at once and frees it. A process that then
 * accesses the Morsel gets SIGBUS.
 *
 * -EPERM       the caller is not its owner and does not have CAP_FOWNER
 * -EOPNOTSUPP  without the module
 */
int vellum_morsel_revoke(const vellum_morsel *morsel);

/*
 * Maps the whole Morsel at `address`, a multiple of its extent. With 0 it chooses the address of the
 * shape, or else any free one. If the Morsel is not sealed, writes of other processes show at any
 * time.
 *
 * -EEXIST  this process has another mapping there
 * -EINVAL  the Morsel cannot lie at this address
 * -EPERM   for writing: its content is sealed
 * -EACCES  for writing: the handle is for reading only
 * -ENOMEM  no addresses left
 */
int vellum_morsel_map(const vellum_morsel *morsel, uint32_t access, uint64_t address,
		      vellum_morsel_mapping **result);

/* The mapping's first address, which never changes; NULL of NULL. */
void *vellum_morsel_mapping_base(const vellum_morsel_mapping *mapping);

/* How many bytes from there the process may access; 0 of NULL. */
uint64_t vellum_morsel_mapping_length(const vellum_morsel_mapping *mapping);

/*
 * Unmaps a mapping and frees the handle. Does nothing with NULL. A forked child must call it only
 * with mappings that the child has made.
 */
void vellum_morsel_unmap(vellum_morsel_mapping *mapping);

#ifdef __cplusplus
}
#endif

#endif
