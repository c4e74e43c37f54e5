/* Every function of the header on the memfd backend; exits with 0 and prints "ok" at the end. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vellum_morsel.h"

#define LAST_ERROR vellum_morsel_last_error
#include "check.h"

static vellum_morsel *make(uint64_t length)
{
	struct vellum_morsel_shape shape = { .length = length };
	vellum_morsel *morsel = NULL;

	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, &shape, &morsel) == 0);
	CHECK(morsel && vellum_morsel_length(morsel) == length);
	return morsel;
}

static struct vellum_morsel_stat stat_of(const vellum_morsel *morsel)
{
	struct vellum_morsel_stat stat;

	CHECK(vellum_morsel_get_stat(morsel, &stat) == 0);
	return stat;
}

static void write_and_read(void)
{
	vellum_morsel *morsel = make(10000);
	vellum_morsel_mapping *writer, *reader;

	CHECK(vellum_morsel_map(morsel, VELLUM_MORSEL_READ_WRITE, 0, &writer) == 0);
	CHECK(vellum_morsel_mapping_length(writer) == 10000);
	memcpy((char *)vellum_morsel_mapping_base(writer) + 5000, "hello", 5);
	CHECK(vellum_morsel_seal(morsel, VELLUM_MORSEL_SEAL_CONTENT) == -EBUSY);
	CHECK(strstr(vellum_morsel_last_error(), "can still be written"));
	vellum_morsel_unmap(writer);

	CHECK(vellum_morsel_seal(morsel, VELLUM_MORSEL_SEAL_CONTENT) == 0);
	CHECK(vellum_morsel_map(morsel, VELLUM_MORSEL_READ_WRITE, 0, &writer) == -EPERM);
	CHECK(vellum_morsel_map(morsel, VELLUM_MORSEL_READ, 0, &reader) == 0);
	vellum_morsel_close(morsel);
	CHECK(memcmp((char *)vellum_morsel_mapping_base(reader) + 5000, "hello", 5) == 0);
	vellum_morsel_unmap(reader);
}

static void pages(void)
{
	vellum_morsel *morsel = make(5 * 4096 + 1);
	struct vellum_morsel_stat stat = stat_of(morsel);

	CHECK(stat.shape.length == 5 * 4096 + 1 && stat.shape.order == 1 && stat.pages == 0);
	CHECK(stat.backend == VELLUM_MORSEL_MEMFD && stat.seals == 0 && stat.mounts == -1);
	CHECK(vellum_morsel_populate(morsel, 4096, 4 * 4096 + 1) == 0);
	CHECK(stat_of(morsel).pages == 5);
	CHECK(vellum_morsel_punch(morsel, 4096, 8192) == 0);
	CHECK(stat_of(morsel).pages == 3);
	CHECK(vellum_morsel_populate(morsel, 1, 4096) == -EINVAL);
	CHECK(vellum_morsel_populate(morsel, UINT64_MAX, 2) == -EINVAL);
	CHECK(vellum_morsel_punch(morsel, 0, 6 * 4096) == -EINVAL);
	vellum_morsel_close(morsel);
}

static void fill(void)
{
	vellum_morsel *morsel = make(8192), *weaker;
	vellum_morsel_mapping *mapping;
	uint64_t filled = 0;
	FILE *file = tmpfile();

	CHECK(file && fputs("0123456789", file) >= 0 && fflush(file) == 0);
	CHECK(vellum_morsel_fill(morsel, fileno(file), 4, 4096, 4096, &filled) == 0 && filled == 6);
	CHECK(vellum_morsel_fill(morsel, fileno(file), 0, 0, 2, NULL) == 0);
	CHECK(vellum_morsel_fill(morsel, fileno(file), 10, 0, 1, &filled) == -ENODATA);
	CHECK(vellum_morsel_fill(morsel, fileno(file), 0, 1, 1, &filled) == -EINVAL);
	CHECK(vellum_morsel_fill(morsel, -1, 0, 0, 1, &filled) == -EBADF && filled == 6);
	CHECK(vellum_morsel_read_only(morsel, &weaker) == 0);
	CHECK(vellum_morsel_fill(weaker, fileno(file), 0, 0, 1, NULL) == -EACCES);
	CHECK(vellum_morsel_seal(weaker, VELLUM_MORSEL_SEAL_CONTENT) == -EACCES);
	CHECK(vellum_morsel_map(weaker, VELLUM_MORSEL_READ, 0, &mapping) == 0);
	CHECK(memcmp((char *)vellum_morsel_mapping_base(mapping) + 4096, "456789", 7) == 0);
	CHECK(memcmp(vellum_morsel_mapping_base(mapping), "01", 3) == 0);
	vellum_morsel_unmap(mapping);
	vellum_morsel_close(weaker);
	vellum_morsel_close(morsel);
	fclose(file);
}

static void share(void)
{
	vellum_morsel *sent = make(4096), *received, *again;
	vellum_morsel_mapping *mapping;
	int ends[2];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
	CHECK(vellum_morsel_send(sent, ends[0]) == 0);
	CHECK(vellum_morsel_receive(ends[1], &received) == 0);
	CHECK(vellum_morsel_fd(received) >= 0 && vellum_morsel_fd(received) != vellum_morsel_fd(sent));
	CHECK(vellum_morsel_from_fd(vellum_morsel_fd(received), &again) == 0);
	vellum_morsel_close(received);
	CHECK(vellum_morsel_map(sent, VELLUM_MORSEL_READ_WRITE, 0, &mapping) == 0);
	strcpy(vellum_morsel_mapping_base(mapping), "shared");
	vellum_morsel_unmap(mapping);
	vellum_morsel_close(sent);
	CHECK(vellum_morsel_map(again, VELLUM_MORSEL_READ, 0, &mapping) == 0);
	CHECK(strcmp(vellum_morsel_mapping_base(mapping), "shared") == 0);
	vellum_morsel_unmap(mapping);
	vellum_morsel_close(again);

	CHECK(write(ends[0], "x", 1) == 1);
	CHECK(vellum_morsel_receive(ends[1], &received) == -EINVAL);
	close(ends[0]);
	CHECK(vellum_morsel_receive(ends[1], &received) == -EINVAL);
	CHECK(vellum_morsel_receive(-1, &received) == -EBADF);
	CHECK(vellum_morsel_from_fd(ends[1], &received) == -EINVAL);
	CHECK(vellum_morsel_from_fd(-1, &received) == -EBADF);
	close(ends[1]);
	CHECK(vellum_morsel_from_fd(ends[1], &received) == -EBADF);
}

static void shapes(void)
{
	struct vellum_morsel_shape shape = { .order = 2 };
	vellum_morsel *morsel = NULL;

	shape.flags = VELLUM_MORSEL_HUGE | VELLUM_MORSEL_INHERIT;
	shape.address = (uint64_t)7 << 40;
	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, &shape, &morsel) == 0);
	shape = stat_of(morsel).shape;
	CHECK(shape.length == 1 << 30 && shape.order == 2 && shape.address == (uint64_t)7 << 40);
	CHECK(shape.flags == (VELLUM_MORSEL_HUGE | VELLUM_MORSEL_INHERIT));

	vellum_morsel_mapping *mapping, *second;
	CHECK(vellum_morsel_map(morsel, VELLUM_MORSEL_READ, 0, &mapping) == 0);
	CHECK((uintptr_t)vellum_morsel_mapping_base(mapping) == (uintptr_t)7 << 40);
	CHECK(vellum_morsel_map(morsel, VELLUM_MORSEL_READ, 0, &second) == -EEXIST);
	CHECK(vellum_morsel_map(morsel, VELLUM_MORSEL_READ, 4096, &second) == -EINVAL);
	vellum_morsel_unmap(mapping);
	vellum_morsel_close(morsel);
	morsel = NULL;

	struct vellum_morsel_shape none = { 0 }, order = { .order = 5 }, flags = { 1, 0, 0, 8 };
	struct vellum_morsel_shape long_one = { .length = UINT64_MAX };
	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, &none, &morsel) == -EINVAL);
	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, &order, &morsel) == -EINVAL);
	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, &flags, &morsel) == -EINVAL);
	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, &long_one, &morsel) == -EINVAL);
	CHECK(vellum_morsel_create(3, &shape, &morsel) == -EINVAL);
	CHECK(morsel == NULL);
}

static void refused(void)
{
	struct vellum_morsel_shape shape = { .length = 1 };
	vellum_morsel *morsel = make(1), *none;
	vellum_morsel_mapping *mapping;

	/* Names need the module, which a machine may have. */
	setenv("VELLUM_MORSELS", "/nowhere", 1);
	CHECK(vellum_morsel_create(VELLUM_MORSEL_KERNEL, &shape, &none) == -ENODEV);
	CHECK(vellum_morsel_create_named("n", &shape, &none) == -EOPNOTSUPP);
	CHECK(vellum_morsel_open("n", VELLUM_MORSEL_READ, &none) == -EOPNOTSUPP);
	CHECK(vellum_morsel_unlink("n") == -EOPNOTSUPP);
	CHECK(vellum_morsel_unlink("a/b") == -EINVAL);
	CHECK(vellum_morsel_open("n", 2, &none) == -EINVAL);
	CHECK(vellum_morsel_open("\xff", VELLUM_MORSEL_READ, &none) == -EINVAL);
	CHECK(vellum_morsel_revoke(morsel) == -EOPNOTSUPP);
	CHECK(vellum_morsel_seal(morsel, VELLUM_MORSEL_SEAL_POPULATION) == -EOPNOTSUPP);
	CHECK(vellum_morsel_seal(morsel, 4) == -EINVAL);
	CHECK(vellum_morsel_map(morsel, 2, 0, &mapping) == -EINVAL);

	setenv("VELLUM_MORSELD", "/nowhere/socket", 1);
	CHECK(vellum_morsel_of_file(0, &none) == -ENOENT);
	CHECK(strstr(vellum_morsel_last_error(), "/nowhere/socket"));
	CHECK(vellum_morsel_of_file(-1, &none) == -EBADF);
	vellum_morsel_close(morsel);
}

static void null(void)
{
	struct vellum_morsel_shape shape = { .length = 1 };
	struct vellum_morsel_stat stat;
	vellum_morsel *morsel = make(1), *other;
	vellum_morsel_mapping *mapping;

	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, NULL, &other) == -EINVAL);
	CHECK(vellum_morsel_create(VELLUM_MORSEL_MEMFD, &shape, NULL) == -EINVAL);
	CHECK(strstr(vellum_morsel_last_error(), "NULL"));
	CHECK(vellum_morsel_create_named(NULL, &shape, &other) == -EINVAL);
	CHECK(vellum_morsel_create_named("n", NULL, &other) == -EINVAL);
	CHECK(vellum_morsel_create_named("n", &shape, NULL) == -EINVAL);
	CHECK(vellum_morsel_open(NULL, VELLUM_MORSEL_READ, &other) == -EINVAL);
	CHECK(vellum_morsel_open("n", VELLUM_MORSEL_READ, NULL) == -EINVAL);
	CHECK(vellum_morsel_unlink(NULL) == -EINVAL);
	CHECK(vellum_morsel_of_file(0, NULL) == -EINVAL);
	CHECK(vellum_morsel_from_fd(vellum_morsel_fd(morsel), NULL) == -EINVAL);
	CHECK(vellum_morsel_send(NULL, 0) == -EINVAL);
	CHECK(vellum_morsel_receive(0, NULL) == -EINVAL);
	CHECK(vellum_morsel_read_only(NULL, &other) == -EINVAL);
	CHECK(vellum_morsel_read_only(morsel, NULL) == -EINVAL);
	CHECK(vellum_morsel_length(NULL) == 0 && vellum_morsel_fd(NULL) == -EINVAL);
	CHECK(vellum_morsel_get_stat(NULL, &stat) == -EINVAL);
	CHECK(vellum_morsel_get_stat(morsel, NULL) == -EINVAL);
	CHECK(vellum_morsel_populate(NULL, 0, 0) == -EINVAL);
	CHECK(vellum_morsel_punch(NULL, 0, 0) == -EINVAL);
	CHECK(vellum_morsel_fill(NULL, 0, 0, 0, 0, NULL) == -EINVAL);
	CHECK(vellum_morsel_seal(NULL, 0) == -EINVAL);
	CHECK(vellum_morsel_revoke(NULL) == -EINVAL);
	CHECK(vellum_morsel_map(NULL, VELLUM_MORSEL_READ, 0, &mapping) == -EINVAL);
	CHECK(vellum_morsel_map(morsel, VELLUM_MORSEL_READ, 0, NULL) == -EINVAL);
	CHECK(vellum_morsel_mapping_base(NULL) == NULL);
	CHECK(vellum_morsel_mapping_length(NULL) == 0);
	vellum_morsel_unmap(NULL);
	vellum_morsel_close(NULL);
	vellum_morsel_close(morsel);
}

int main(void)
{
	CHECK(strcmp(vellum_morsel_last_error(), "") == 0);
	write_and_read();
	pages();
	fill();
	share();
	shapes();
	refused();
	null();
	puts("ok");
	return 0;
}
