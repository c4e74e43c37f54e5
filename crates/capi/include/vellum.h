/*
 * Stores: ordered maps from keys to values in a file larger than memory, values of any length.
 *
 * This header is the manual of the part of libvellum that has stores. Link with -lvellum. The part
 * that has Morsels is described in vellum_morsel.h.
 *
 * A store is a file of named trees. A tree maps keys to values, both strings of bytes. What is read
 * comes through a pool of memory whose size the program chooses, and which is never exceeded: a
 * value goes in and out piece by piece, by a writer and a reader, and may be longer than the pool.
 *
 *     struct vellum_store_options options = { .pool_bytes = 64 << 20, .flags = VELLUM_CREATE };
 *     vellum_store *store;
 *     vellum_tree *tree;
 *     vellum_writer *writer;
 *     int error = vellum_store_open("films.vellum", &options, &store);
 *     if (error)
 *         errx(1, "%s", vellum_last_error());
 *     error = vellum_tree_open(store, "films", VELLUM_CREATE, &tree);
 *     if (!error) {
 *         error = vellum_writer_open(tree, "Metropolis", 10, &writer);
 *         while (!error && (count = read(file, buffer, sizeof buffer)) > 0)
 *             error = vellum_writer_write(writer, buffer, count);
 *         if (!error && count == 0)
 *             error = vellum_writer_finish(writer, 0);
 *         ...
 *         vellum_writer_close(writer);
 *         vellum_tree_close(tree);
 *     }
 *     error = vellum_store_close(store);
 *
 * Errors. A function that returns int returns 0, or a negative errno value: -EINVAL for arguments
 * that no call could take, NULL among them, and else what each function says. Any function that
 * works on a store may return
 *
 * -ESHUTDOWN  the store was closed
 * -EBADMSG    the file is damaged
 * -EIO        the file could not be read or written, or an earlier failure to write stopped changes;
 *             if the system says more than that, the system's number
 * -ENOBUFS    all of the pool is in use by other threads
 *
 * and a function that changes a store also -EROFS, -ENOSPC. vellum_last_error() has the same in
 * words, with what to do. After an error nothing was changed, and the place for the result was not
 * written.
 *
 * Handles. A handle is freed exactly once, by its function that ends in _close, and not used while
 * or after it is. Otherwise several threads may use one at the same time; calls of one reader, or of
 * one writer, wait for each other. A tree needs the handle of its store no more, a reader and a
 * writer need neither handle: handles may be freed in any order. What ends the use of all of them is
 * vellum_store_close(): calls of those that are left return -ESHUTDOWN, and they have to be freed
 * nevertheless.
 *
 * The end of the process. exit() closes the stores that are open. A process that is killed, or ends
 * by _exit(), leaves a store that it changed after the last vellum_store_sync() unclean, and an
 * unclean store does not open (-EUCLEAN). The child of a fork must not use the handles of its
 * parent, but it may free readers and writers, which are the parent's still.
 *
 * Keys have up to some thousand bytes, and the empty key is a key; values have up to 2^48 bytes.
 * Linux 5.10 and later, pages of 4 KiB.
 */
#ifndef VELLUM_H
#define VELLUM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open file of trees. */
typedef struct vellum_store vellum_store;

/* An ordered map of an open store. */
typedef struct vellum_tree vellum_tree;

/* A value that is being read. */
typedef struct vellum_reader vellum_reader;

/* A value that is being written. */
typedef struct vellum_writer vellum_writer;

/* Flags. Each function says which it takes; all others must be 0. */
#define VELLUM_CREATE    1u /* make what is not there yet */
#define VELLUM_READ_ONLY 2u /* change nothing; several processes may have a file open so */
#define VELLUM_NEW       4u /* refuse a key that has a value, instead of replacing it */

/* How a store is opened. */
struct vellum_store_options {
	uint64_t pool_bytes; /* memory for pages; 0: half of what the process may use */
	uint32_t flags;      /* VELLUM_CREATE or VELLUM_READ_ONLY */
	uint32_t reserved;   /* 0 */
};

/*
 * Why the last call that failed in this thread did, and what to do: UTF-8, "" before the first.
 * Valid until the next call that fails in this thread, or the thread ends. Never NULL.
 */
const char *vellum_last_error(void);

/*
 * Opens the store in a file. `options` may be NULL: all of its members are 0 then.
 *
 * -ENOENT       there is no file, and VELLUM_CREATE was not asked for
 * -EBUSY        another process, or another handle, has it open
 * -EUCLEAN      it was not closed cleanly: `vellum dump --salvage` saves what can be read
 * -EMEDIUMTYPE  it is no store, or one of another version
 * -EINVAL       the pool is too small, or larger than the memory
 */
int vellum_store_open(const char *path, const struct vellum_store_options *options,
		      vellum_store **result);

/* Makes durable what was changed before the call, by any thread. Changes may go on meanwhile. */
int vellum_store_sync(const vellum_store *store);

/*
 * Makes everything durable, ends the use of the store's trees, readers and writers, unlocks the file
 * and frees the handle; NULL is nothing. The handle is freed also if this fails, and what was not
 * durable before may be lost then. Values that are being written and were not finished are dropped.
 */
int vellum_store_close(vellum_store *store);

/*
 * Opens the tree of a name, in UTF-8. Flag: VELLUM_CREATE.
 *
 * -ENOENT  the store has none, and VELLUM_CREATE was not asked for
 */
int vellum_tree_open(const vellum_store *store, const char *name, uint32_t flags,
		     vellum_tree **result);

/* Frees a handle; NULL is nothing. The tree stays. */
void vellum_tree_close(vellum_tree *tree);

/*
 * Stores a value that is in memory, at once and as a whole. Flag: VELLUM_NEW. A pointer may be NULL
 * if its length is 0.
 *
 * -ENAMETOOLONG  the key is too long
 * -EEXIST        with VELLUM_NEW: the key has a value
 */
int vellum_tree_put(const vellum_tree *tree, const void *key, size_t key_length,
		    const void *value, size_t value_length, uint32_t flags);

/*
 * Removes a key and its value.
 *
 * -ENODATA  there is no such key
 */
int vellum_tree_remove(const vellum_tree *tree, const void *key, size_t key_length);

/*
 * Begins to read the value of a key. The reader has the value that the key has now, to its end:
 * whatever becomes of the key or the tree takes none of it away. The value's space is given back
 * when the reader is closed. Every byte is checked before it is handed out.
 *
 * A reader takes a buffer of 1 MiB at most, and up to 4 MiB for a value that was written with a much
 * larger pool.
 *
 * -ENODATA  there is no such key
 */
int vellum_reader_open(const vellum_tree *tree, const void *key, size_t key_length,
		       vellum_reader **result);

/* Length of the value; 0 of NULL. */
uint64_t vellum_reader_length(const vellum_reader *reader);

/*
 * Reads on from where the last vellum_reader_read() ended, first from the beginning. Puts `length`
 * bytes into `buffer`, fewer where the value ends, and their number into `count`: 0 at the end. After
 * an error the next call reads from the same place.
 */
int vellum_reader_read(const vellum_reader *reader, void *buffer, size_t length, size_t *count);

/*
 * Reads from the byte `offset`, as vellum_reader_read() does, whose place stays as it is. There are
 * no bytes beyond the end.
 */
int vellum_reader_read_at(const vellum_reader *reader, uint64_t offset, void *buffer,
			  size_t length, size_t *count);

/* Frees a handle; NULL is nothing. */
void vellum_reader_close(vellum_reader *reader);

/*
 * Begins to write a value. The key has it when vellum_writer_finish() has returned 0, at once and as
 * a whole. Until then the key has what it had, whatever becomes of the process. The writer takes a
 * buffer of 256 KiB at most, and keeps no other thread waiting.
 *
 * -ENAMETOOLONG  the key is too long
 */
int vellum_writer_open(const vellum_tree *tree, const void *key, size_t key_length,
		       vellum_writer **result);

/*
 * Appends bytes to the value. After an error the writer can only be closed.
 *
 * -EFBIG   the value would be longer than 2^48 bytes
 * -EALREADY  the writer was finished
 */
int vellum_writer_write(const vellum_writer *writer, const void *bytes, size_t length);

/* Bytes that were written so far; 0 of NULL, and once it was finished. */
uint64_t vellum_writer_length(const vellum_writer *writer);

/*
 * Gives the value to the key; replaces the one that it has, or refuses with VELLUM_NEW. The writer
 * ends by this call, also if it fails: then the key has what it had, and the value is dropped.
 *
 * -EEXIST    with VELLUM_NEW: the key has a value
 * -EALREADY  the writer was finished
 */
int vellum_writer_finish(const vellum_writer *writer, uint32_t flags);

/*
 * Frees a handle; NULL is nothing. A value that was not finished is dropped, and its space is given
 * back.
 */
void vellum_writer_close(vellum_writer *writer);

#ifdef __cplusplus
}
#endif

#endif
