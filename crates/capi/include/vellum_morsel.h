/*
 * Morsels: memory objects that processes mount as a whole.
 *
 * This header is the manual of libvellum. Link with -lvellum.
 *
 * A Morsel is memory that has a file descriptor. One process makes it, fills it and seals its
 * content; others receive the descriptor, or open it by name, and map all of it. With Vellum's
 * kernel module a mapping costs one page-table entry, however large the Morsel is, and all mappings
 * share the page tables below it. Without the module a Morsel is a sealed memfd: the memory is
 * shared, the page tables are not, and what cannot be had is refused.
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
 * Errors. A function that returns int returns 0, or a negative errno value: -EINVAL for arguments
 * that no call could take, NULL among them, and else what each function says.
 * vellum_morsel_last_error() has the same in words, with what to do. After an error nothing was
 * made, and the place for the result was not written, but for what a function says of itself.
 *
 * Handles. A handle is freed exactly once, by vellum_morsel_close() or vellum_morsel_unmap(), and
 * not used while or after it is. Otherwise several threads may use one at the same time. A mapping
 * needs its Morsel's handle no more: the memory lives as long as a descriptor, a mapping or a name
 * of it, in whatever process.
 *
 * Descriptors. A function that takes one works on a duplicate: the caller's stays the caller's.
 *
 * Offsets and lengths are in bytes. Linux 5.10 and later, pages of 4 KiB.
 */
#ifndef VELLUM_MORSEL_H
#define VELLUM_MORSEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A Morsel of this process: a descriptor of which it is known what is behind it. */
typedef struct vellum_morsel vellum_morsel;

/* A Morsel in the address space of this process. */
typedef struct vellum_morsel_mapping vellum_morsel_mapping;

/* Backends. */
#define VELLUM_MORSEL_AUTO   0u /* the best that this machine offers */
#define VELLUM_MORSEL_KERNEL 1u /* Vellum's module: shared page tables, names */
#define VELLUM_MORSEL_MEMFD  2u /* a sealed memfd, on every kernel */

/* What is to be done with a Morsel. */
#define VELLUM_MORSEL_READ       0u
#define VELLUM_MORSEL_READ_WRITE 1u

/* Seals, which never come off. */
#define VELLUM_MORSEL_SEAL_CONTENT    1u /* no writing, filling, punching, mapping for writing */
#define VELLUM_MORSEL_SEAL_POPULATION 2u /* holes stay, access to one is SIGBUS; needs the module */

/* Flags of a shape. */
#define VELLUM_MORSEL_HUGE     1u /* pages of 2 MiB where they can be had; order 2 and above */
#define VELLUM_MORSEL_PINNABLE 2u /* devices may have its pages: direct I/O; not with HUGE */
#define VELLUM_MORSEL_INHERIT  4u /* a forked child keeps mappings; else it has nothing there */

/* What is decided when a Morsel is made. Members that are 0 have the meaning said there. */
struct vellum_morsel_shape {
	uint64_t length;  /* at most the extent; 0: as long as the order is */
	uint64_t address; /* where all processes map it, a multiple of its extent; 0: anywhere */
	uint32_t order;   /* it covers 512^order pages, its extent; up to 4; 0: the smallest */
	uint32_t flags;
};

/* What a Morsel is and has. Counts are -1 where the backend does not know. */
struct vellum_morsel_stat {
	struct vellum_morsel_shape shape;
	uint32_t backend; /* VELLUM_MORSEL_KERNEL or VELLUM_MORSEL_MEMFD */
	uint32_t seals;
	uint64_t pages;   /* pages of 4 KiB that have memory */
	int64_t huge;     /* entries of 2 MiB, whose pages are among those */
	int64_t tables;   /* pages that its page tables take */
	int64_t mounts;   /* mappings, of whatever processes */
};

/*
 * Why the last call that failed in this thread did, and what to do: UTF-8, "" before the first.
 * Valid until the next call that fails in this thread, or the thread ends. Never NULL.
 */
const char *vellum_morsel_last_error(void);

/*
 * Makes a Morsel without a name. It has no memory yet, and reads as zeros.
 *
 * -EINVAL  no Morsel can have this shape
 * -ENODEV  the backend cannot be used here
 * -ENOSPC, -ENOMEM, -EACCES
 */
int vellum_morsel_create(uint32_t backend, const struct vellum_morsel_shape *shape,
			 vellum_morsel **result);

/*
 * Makes one with a name, 1 to 255 bytes of UTF-8 without '/', which its owner alone may open.
 *
 * Errors of vellum_morsel_create(), and
 * -EEXIST      the name is taken
 * -EOPNOTSUPP  without the module there are no names
 */
int vellum_morsel_create_named(const char *name, const struct vellum_morsel_shape *shape,
			       vellum_morsel **result);

/*
 * Opens a Morsel by its name, to be read, or to be written, too.
 *
 * -ENOENT      there is none
 * -EACCES      its mode forbids it
 * -EOPNOTSUPP  without the module there are no names
 */
int vellum_morsel_open(const char *name, uint32_t access, vellum_morsel **result);

/* Takes a name away; the Morsel goes with its last user. Errors of vellum_morsel_open(). */
int vellum_morsel_unlink(const char *name);

/*
 * The Morsel of a file, open for reading, from the cache daemon, whose socket is at
 * $VELLUM_MORSELD or /run/vellum/morseld.sock. It is read only once, for all processes; its content
 * is sealed. Waits while the daemon loads it.
 *
 * -ENOENT, -ECONNREFUSED, -EACCES  no daemon answers, or this user may not ask it
 * -ECANCELED                       the daemon refused, the message says why
 * -ECONNRESET, -EPROTO             it ended, or what answers is not that daemon
 */
int vellum_morsel_of_file(int file, vellum_morsel **result);

/*
 * The Morsel of a descriptor, which may come from somebody who is not trusted.
 *
 * -EBADF   it is no descriptor
 * -EINVAL  it is not that of a Morsel, or one that could be truncated
 */
int vellum_morsel_from_fd(int fd, vellum_morsel **result);

/* Sends a Morsel to the other end of a Unix stream socket, which gets the rights of this handle. */
int vellum_morsel_send(const vellum_morsel *morsel, int socket);

/*
 * Receives one from the other end, which need not be trusted. Waits for it.
 *
 * -EINVAL  what came is no Morsel, or the other end has hung up
 */
int vellum_morsel_receive(int socket, vellum_morsel **result);

/* The same Morsel by another handle, which cannot change it. Needs /proc. */
int vellum_morsel_read_only(const vellum_morsel *morsel, vellum_morsel **result);

/* Frees a handle; NULL is nothing. */
void vellum_morsel_close(vellum_morsel *morsel);

/* Its length; 0 of NULL. */
uint64_t vellum_morsel_length(const vellum_morsel *morsel);

/* Its descriptor, which stays the handle's; -EINVAL of NULL. */
int vellum_morsel_fd(const vellum_morsel *morsel);

/* What it is and has at the moment. -EIO if it was revoked. */
int vellum_morsel_get_stat(const vellum_morsel *morsel, struct vellum_morsel_stat *result);

/*
 * Gives memory to whole pages that have none, which then read as zeros. The last page may be a part
 * of one, where the Morsel ends.
 *
 * -EINVAL  the range is not within the Morsel, or not of whole pages
 * -EACCES  the handle is for reading only
 * -EPERM   the population is sealed
 * -EIO     the Morsel was revoked
 * -ENOSPC, -ENOMEM
 */
int vellum_morsel_populate(const vellum_morsel *morsel, uint64_t offset, uint64_t length);

/*
 * Takes the memory off whole pages, which read as zeros from then on. Errors as above, but the seal
 * is that of the content.
 */
int vellum_morsel_punch(const vellum_morsel *morsel, uint64_t offset, uint64_t length);

/*
 * Reads `length` bytes of a file, its byte `from` first, to `offset`, a multiple of 4096. Fewer
 * where the file ends; `filled`, unless NULL, gets how many. What was read before an error stays.
 *
 * Errors of vellum_morsel_populate(), those of reading the file, and
 * -EPERM    the content is sealed
 * -ENODATA  the file ends before `from`
 * -EINVAL   the file can not be read at offsets, or is not open for reading
 */
int vellum_morsel_fill(const vellum_morsel *morsel, int file, uint64_t from, uint64_t offset,
		       uint64_t length, uint64_t *filled);

/*
 * Puts seals on it.
 *
 * -EBUSY       a process has it mapped for writing, or does I/O into it
 * -EACCES      the handle is for reading only
 * -EOPNOTSUPP  the population, without the module
 */
int vellum_morsel_seal(const vellum_morsel *morsel, uint32_t seals);

/*
 * Takes it from everybody at once, and gives its memory back: who accesses it gets SIGBUS.
 *
 * -EPERM       only its owner may, or who has CAP_FOWNER
 * -EOPNOTSUPP  without the module
 */
int vellum_morsel_revoke(const vellum_morsel *morsel);

/*
 * Maps all of it: at `address`, a multiple of its extent; or, if that is 0, where it is bound to or
 * there is room. What others write to a Morsel that is not sealed may be seen at any time.
 *
 * -EEXIST  this process has something else there
 * -EINVAL  it cannot lie there
 * -EPERM   for writing: its content is sealed
 * -EACCES  for writing: the handle is for reading only
 * -ENOMEM  no addresses left
 */
int vellum_morsel_map(const vellum_morsel *morsel, uint32_t access, uint64_t address,
		      vellum_morsel_mapping **result);

/* Where it begins, the same for its whole life; NULL of NULL. */
void *vellum_morsel_mapping_base(const vellum_morsel_mapping *mapping);

/* Bytes from there that may be accessed; 0 of NULL. */
uint64_t vellum_morsel_mapping_length(const vellum_morsel_mapping *mapping);

/*
 * Unmaps it and frees the handle; NULL is nothing. In a forked child, use it only on mappings that
 * the child has made: the parent's stay as they are.
 */
void vellum_morsel_unmap(vellum_morsel_mapping *mapping);

#ifdef __cplusplus
}
#endif

#endif
