/* Every function of the header, by mmap; exits with 0 and prints "ok" at the end. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vellum_dax.h"

#define LAST_ERROR vellum_dax_last_error
#include "check.h"

#define WRITE_AND_CREATE (VELLUM_DAX_WRITE | VELLUM_DAX_CREATE)

static const struct vellum_dax_options by_mmap = { .backend = VELLUM_DAX_MMAP };

static vellum_dax *make(const char *path)
{
	vellum_dax *file = NULL;

	CHECK(vellum_dax_open(path, WRITE_AND_CREATE, &by_mmap, &file) == 0);
	CHECK(file && vellum_dax_backend(file) == VELLUM_DAX_MMAP);
	return file;
}

static void write_and_read(void)
{
	vellum_dax *file = make("file"), *again;
	vellum_dax_mapping *writer, *reader;
	uint64_t length, offset;
	char *base;
	int fd;

	CHECK(vellum_dax_extend(file, 10000) == 0);
	CHECK(vellum_dax_length(file, &length) == 0 && length == 10000);
	CHECK(vellum_dax_map(file, VELLUM_DAX_READ_WRITE, &writer) == 0);
	CHECK(vellum_dax_write_durably(writer, 5000, "hello", 5) == 0);
	memcpy((char *)vellum_dax_mapping_base(writer) + 9995, "world", 5);
	CHECK(vellum_dax_persist(writer, 9995, 5) == 0);
	CHECK(vellum_dax_append(file, " and more", 9, &offset) == 0 && offset == 10000);
	CHECK(vellum_dax_append(file, "!", 1, NULL) == 0);
	CHECK(vellum_dax_refresh(file) == 0 && vellum_dax_sync(file) == 0);

	fd = open("file", O_RDONLY);
	CHECK(fd >= 0 && vellum_dax_from_fd(fd, NULL, &again) == 0 && close(fd) == 0);
	CHECK(vellum_dax_map(again, VELLUM_DAX_READ_WRITE, &reader) == -EACCES);
	CHECK(vellum_dax_append(again, "x", 1, NULL) == -EACCES);
	CHECK(vellum_dax_map(again, VELLUM_DAX_READ, &reader) == 0);
	CHECK(vellum_dax_mapping_length(reader, &length) == 0 && length == 10010);
	vellum_dax_close(file);
	vellum_dax_close(again);
	base = vellum_dax_mapping_base(reader);
	CHECK(memcmp(base + 5000, "hello\0", 6) == 0);
	CHECK(memcmp(base + 9995, "world and more!", 15) == 0);
	CHECK(vellum_dax_write_durably(reader, 0, "x", 1) == -EACCES);
	CHECK(vellum_dax_write_durably(writer, 10009, "xy", 2) == -EINVAL);
	CHECK(strstr(vellum_dax_last_error(), "not within the mapping"));
	CHECK(vellum_dax_persist(writer, UINT64_MAX, 2) == -EINVAL);
	vellum_dax_unmap(writer);
	vellum_dax_unmap(reader);
}

static void tables(void)
{
	const struct vellum_dax_options table = { VELLUM_DAX_TABLE, VELLUM_DAX_FLUSHED };
	struct vellum_dax_stat stat;
	vellum_dax *file = make("file"), *none = NULL;

	CHECK(vellum_dax_why_no_table(file) == -EOPNOTSUPP);
	CHECK(strstr(vellum_dax_last_error(), "has chosen mmap"));
	CHECK(vellum_dax_get_stat(file, &stat) == -EOPNOTSUPP);
	vellum_dax_close(file);
	/* A machine with the module may have tables here. */
	if (vellum_dax_open("file", VELLUM_DAX_WRITE, &table, &file) == 0) {
		CHECK(vellum_dax_backend(file) == VELLUM_DAX_TABLE);
		CHECK(vellum_dax_why_no_table(file) == 0);
		CHECK(vellum_dax_get_stat(file, &stat) == 0 && stat.pages == 3);
		vellum_dax_close(file);
	} else {
		CHECK(strstr(vellum_dax_last_error(), "can have no file table"));
		CHECK(vellum_dax_open("file", 0, &table, &none) == -EOPNOTSUPP && !none);
	}
}

static void heaps(void)
{
	vellum_dax_heap *heap;
	vellum_dax_ephemeral *all, *part, *empty;
	int fd = open("file", O_RDWR), none = open("none", O_RDWR | O_CREAT, 0600);

	CHECK(vellum_dax_heap_open(VELLUM_DAX_MMAP, VELLUM_DAX_READ_WRITE, 0, 0, &heap) == 0);
	CHECK(vellum_dax_heap_backend(heap) == VELLUM_DAX_MMAP);
	CHECK(vellum_dax_heap_map(heap, fd, &all) == 0);
	CHECK(vellum_dax_heap_map_range(heap, fd, 4999, 7, &part) == 0);
	CHECK(vellum_dax_heap_map(heap, none, &empty) == 0);
	CHECK(vellum_dax_heap_map_range(heap, fd, UINT64_MAX, 1, &empty) == -EFBIG);
	close(fd);
	close(none);
	CHECK(vellum_dax_heap_map(heap, none, &empty) == -EBADF);
	CHECK(vellum_dax_heap_flush(heap) == 0);
	vellum_dax_heap_close(heap);
	/* The mappings do not need it. */
	CHECK(vellum_dax_ephemeral_length(all) == 10010);
	CHECK(vellum_dax_ephemeral_length(part) == 7);
	CHECK(memcmp(vellum_dax_ephemeral_base(part), "\0hello\0", 7) == 0);
	memcpy(vellum_dax_ephemeral_base(all), "begin", 5);
	CHECK(vellum_dax_ephemeral_sync(all) == 0);
	CHECK(vellum_dax_ephemeral_length(empty) == 0 && vellum_dax_ephemeral_sync(empty) == 0);
	vellum_dax_ephemeral_unmap(all);
	vellum_dax_ephemeral_unmap(part);
	vellum_dax_ephemeral_unmap(empty);
}

static void pools(void)
{
	vellum_dax_pool *pool;
	vellum_dax *file;
	uint64_t length;
	struct stat found;

	CHECK(vellum_dax_pool_open("pool", &pool) == 0);
	CHECK(vellum_dax_pool_create(pool, "new", 70000, NULL, &file) == 0);
	CHECK(vellum_dax_length(file, &length) == 0 && length == 70000);
	vellum_dax_close(file);
	CHECK(vellum_dax_pool_create(pool, "new", 5, NULL, &file) == -EEXIST);
	CHECK(vellum_dax_pool_replace(pool, "new", 5, &by_mmap, &file) == 0);
	vellum_dax_close(file);
	CHECK(stat("new", &found) == 0 && found.st_size == 5);
	CHECK(vellum_dax_pool_create(pool, "/proc/none", 5, NULL, &file) == -EXDEV);
	vellum_dax_pool_close(pool);
	CHECK(chmod("pool", 0755) == 0 && vellum_dax_pool_open("pool", &pool) == -EINVAL);
	CHECK(strstr(vellum_dax_last_error(), "chmod 700"));
}

static void wrong_arguments(void)
{
	const struct vellum_dax_options strange = { .backend = 9 }, odd = { .durability = 2 };
	vellum_dax *file = make("file"), *none = NULL;
	vellum_dax_mapping *mapping = NULL;
	vellum_dax_heap *heap = NULL;

	CHECK(vellum_dax_open("file", 0, &strange, &none) == -EINVAL);
	CHECK(vellum_dax_open("file", 0, &odd, &none) == -EINVAL);
	CHECK(vellum_dax_open("file", VELLUM_DAX_CREATE, NULL, &none) == -EINVAL);
	CHECK(vellum_dax_open("file", 8, NULL, &none) == -EINVAL);
	CHECK(vellum_dax_open("nothing", VELLUM_DAX_WRITE, NULL, &none) == -ENOENT);
	CHECK(vellum_dax_open(NULL, 0, NULL, &none) == -EINVAL);
	CHECK(vellum_dax_open("file", 0, NULL, NULL) == -EINVAL);
	CHECK(vellum_dax_from_fd(-1, NULL, &none) == -EBADF);
	CHECK(!none);
	CHECK(vellum_dax_map(file, 2, &mapping) == -EINVAL && !mapping);
	CHECK(vellum_dax_map(NULL, 0, &mapping) == -EINVAL && vellum_dax_map(file, 0, NULL) == -EINVAL);
	CHECK(vellum_dax_append(file, NULL, 1, NULL) == -EINVAL);
	CHECK(vellum_dax_append(NULL, "x", 1, NULL) == -EINVAL);
	CHECK(vellum_dax_extend(NULL, 1) == -EINVAL && vellum_dax_sync(NULL) == -EINVAL);
	CHECK(vellum_dax_refresh(NULL) == -EINVAL && vellum_dax_why_no_table(NULL) == -EINVAL);
	CHECK(vellum_dax_length(file, NULL) == -EINVAL && vellum_dax_get_stat(file, NULL) == -EINVAL);
	CHECK(vellum_dax_write_durably(NULL, 0, "", 0) == -EINVAL);
	CHECK(vellum_dax_persist(NULL, 0, 0) == -EINVAL);
	CHECK(vellum_dax_mapping_length(NULL, NULL) == -EINVAL);
	CHECK(!vellum_dax_mapping_base(NULL) && !vellum_dax_backend(NULL));
	CHECK(vellum_dax_heap_open(0, 2, 0, 0, &heap) == -EINVAL);
	CHECK(vellum_dax_heap_open(3, 0, 0, 0, &heap) == -EINVAL);
	CHECK(!heap && !vellum_dax_heap_backend(NULL) && vellum_dax_heap_flush(NULL) == -EINVAL);
	CHECK(vellum_dax_heap_map(NULL, 0, NULL) == -EINVAL);
	CHECK(vellum_dax_heap_map_range(NULL, 0, 0, 0, NULL) == -EINVAL);
	CHECK(!vellum_dax_ephemeral_base(NULL) && !vellum_dax_ephemeral_length(NULL));
	CHECK(vellum_dax_ephemeral_sync(NULL) == -EINVAL);
	CHECK(vellum_dax_pool_open(NULL, NULL) == -EINVAL);
	CHECK(vellum_dax_pool_create(NULL, "a", 1, NULL, &none) == -EINVAL);
	CHECK(vellum_dax_pool_replace(NULL, "a", 1, NULL, &none) == -EINVAL);
	vellum_dax_close(file);
	vellum_dax_close(NULL);
	vellum_dax_unmap(NULL);
	vellum_dax_heap_close(NULL);
	vellum_dax_ephemeral_unmap(NULL);
	vellum_dax_pool_close(NULL);
}

int main(void)
{
	CHECK(strcmp(vellum_dax_last_error(), "") == 0);
	write_and_read();
	tables();
	heaps();
	pools();
	wrong_arguments();
	puts("ok");
	return 0;
}
