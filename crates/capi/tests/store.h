/* Shared by the tests in C that have stores of long values. Not every test calls every function. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vellum.h"

#define LAST_ERROR vellum_last_error
#include "check.h"

#define POOL   (1 << 20)
#define PART   100000
#define LENGTH (240ull * PART) /* 23 times the pool */

static inline vellum_store *open_store(const char *name, uint32_t flags)
{
	struct vellum_store_options options = { .pool_bytes = POOL, .flags = flags };
	vellum_store *store = NULL;

	CHECK(vellum_store_open(name, &options, &store) == 0 && store);
	return store;
}

static inline vellum_tree *open_tree(const vellum_store *store)
{
	vellum_tree *tree = NULL;

	CHECK(vellum_tree_open(store, "t", VELLUM_CREATE, &tree) == 0 && tree);
	return tree;
}

/* The bytes of a value from `offset` on. */
static inline void make(unsigned char *bytes, uint64_t offset, size_t length, uint64_t seed)
{
	for (size_t i = 0; i < length; i++) {
		uint64_t mixed = ((offset + i) / 8 + seed) * 0x9e3779b97f4a7c15ull;

		bytes[i] = mixed >> 13 >> (offset + i) % 8;
	}
}

static inline int is_made(const unsigned char *bytes, uint64_t offset, size_t length, uint64_t seed)
{
	unsigned char *expected = malloc(length ? length : 1);
	int same;

	CHECK(expected);
	make(expected, offset, length, seed);
	same = memcmp(bytes, expected, length) == 0;
	free(expected);
	return same;
}

static inline vellum_writer *begin(const vellum_tree *tree, const char *key, uint64_t length,
			    uint64_t seed)
{
	unsigned char *part = malloc(PART);
	vellum_writer *writer = NULL;

	CHECK(part && vellum_writer_open(tree, key, strlen(key), &writer) == 0);
	for (uint64_t done = 0; done < length; done += PART) {
		size_t count = length - done < PART ? length - done : PART;

		make(part, done, count, seed);
		CHECK(vellum_writer_write(writer, part, count) == 0);
	}
	CHECK(vellum_writer_length(writer) == length);
	free(part);
	return writer;
}

static inline void write_value(const vellum_tree *tree, const char *key, uint64_t length, uint64_t seed)
{
	vellum_writer *writer = begin(tree, key, length, seed);

	CHECK(vellum_writer_finish(writer, 0) == 0);
	vellum_writer_close(writer);
}

static inline vellum_reader *reader_of(const vellum_tree *tree, const char *key)
{
	vellum_reader *reader = NULL;

	CHECK(vellum_reader_open(tree, key, strlen(key), &reader) == 0 && reader);
	return reader;
}

static inline void expect(const vellum_reader *reader, uint64_t length, uint64_t seed)
{
	unsigned char *part = malloc(PART);
	size_t count = 1;

	CHECK(part && vellum_reader_length(reader) == length);
	for (uint64_t done = 0; count > 0; done += count) {
		CHECK(vellum_reader_read(reader, part, PART, &count) == 0);
		CHECK(count == (length - done < PART ? length - done : PART));
		CHECK(is_made(part, done, count, seed));
	}
	free(part);
}

static inline vellum_transaction *begin_transaction(const vellum_store *store, uint32_t flags)
{
	vellum_transaction *transaction = NULL;

	CHECK(vellum_transaction_begin(store, flags, &transaction) == 0 && transaction);
	return transaction;
}

/* The number that a key has in a transaction; -1 if it has none. */
static inline int number_in(const vellum_transaction *transaction, const vellum_tree *tree,
		     const char *key)
{
	size_t length = 99;
	int number = 0;
	int error = vellum_transaction_get(transaction, tree, key, strlen(key), &number,
					   sizeof number, &length);

	if (error == -ENODATA)
		return -1;
	CHECK(error == 0 && length == sizeof number);
	return number;
}

static inline int put_in(const vellum_transaction *transaction, const vellum_tree *tree,
		  const char *key, int number, uint32_t flags)
{
	return vellum_transaction_put(transaction, tree, key, strlen(key), &number,
				      sizeof number, flags);
}
