// SPDX-License-Identifier: GPL-2.0
/*
 * Commands through io_uring (refined exmap, section III-A), as the published module has them:
 *
 *	cmd_op = interface | opcode << 8
 *
 * The command holds a struct iovec, which is a part of the surface. With a registered buffer
 * (IORING_URING_CMD_FIXED) it is a part of the buffer, which holds entries, and gets the results in
 * their place. A command is carried out when it is submitted.
 */

#include <linux/mm.h>
#include <linux/uio.h>
#include <vellum/exmap_published.h>

#include "core/compat.h"
#include "exmap/exmap.h"

/* Reads the entries of a registered buffer into the interface's ranges. */
static int exmap_uring_read_buffer(struct exmap *exmap, struct exmap_interface *interface,
				   struct io_uring_cmd *command, struct iovec buffer)
{
	size_t i, entries = buffer.iov_len / sizeof(u64);
	struct iov_iter iter;
	int error;
	u64 entry;

	if (buffer.iov_len % sizeof(u64) || entries > VELLUM_EXMAP_VECTOR_ENTRIES)
		return -EINVAL;
	error = io_uring_cmd_import_fixed((unsigned long)buffer.iov_base, buffer.iov_len, WRITE,
					  &iter, command);
	for (i = 0; !error && i < entries; i++) {
		if (copy_from_iter(&entry, sizeof(entry), &iter) != sizeof(entry))
			return -EFAULT;
		interface->ranges[i] = exmap_decode(exmap, entry);
	}
	return error ? error : (int)entries;
}

static long exmap_uring_write_buffer(struct exmap_interface *interface,
				     struct io_uring_cmd *command, struct iovec buffer,
				     unsigned int entries)
{
	struct iov_iter iter;
	unsigned int i;
	long failed = 0;
	int error;

	error = io_uring_cmd_import_fixed((unsigned long)buffer.iov_base, buffer.iov_len, READ,
					  &iter, command);
	for (i = 0; !error && i < entries; i++) {
		u64 entry = exmap_encode(interface, interface->ranges[i], interface->results[i],
					 &failed);

		if (copy_to_iter(&entry, sizeof(entry), &iter) != sizeof(entry))
			return -EFAULT;
	}
	return error ? error : failed;
}

static long exmap_uring_carry_out(struct exmap *exmap, unsigned int index, unsigned int opcode,
				  unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];

	switch (opcode) {
	case EXMAP_PUBLISHED_OP_ALLOC:
		exmap_alloc(exmap, index, interface->ranges, interface->results, entries);
		return 0;
	case EXMAP_PUBLISHED_OP_FREE:
		exmap_free(exmap, index, interface->ranges, interface->results, entries);
		return 0;
	}
	return -EINVAL;
}

/* Returns bytes, for at most as many pages as read() has in one call: the result has 32 bits. */
static long exmap_uring_range(struct exmap *exmap, unsigned int index, unsigned int opcode,
			      struct iovec part)
{
	struct exmap_interface *interface = &exmap->interface[index];
	unsigned long address = (unsigned long)part.iov_base;
	long error = exmap_find_range(exmap, address, min_t(size_t, part.iov_len, MAX_RW_COUNT),
				      &interface->ranges[0]);

	if (!error)
		error = exmap_uring_carry_out(exmap, index, opcode, 1);
	if (!error)
		error = interface->results[0].error;
	return error ? error : (long)interface->results[0].pages << PAGE_SHIFT;
}

static long exmap_uring_buffer(struct exmap *exmap, unsigned int index, unsigned int opcode,
			       struct io_uring_cmd *command, struct iovec buffer)
{
	struct exmap_interface *interface = &exmap->interface[index];
	int entries = exmap_uring_read_buffer(exmap, interface, command, buffer);
	long error;

	if (entries < 0)
		return entries;
	error = exmap_uring_carry_out(exmap, index, opcode, entries);
	return error ? error : exmap_uring_write_buffer(interface, command, buffer, entries);
}

int exmap_uring_cmd(struct io_uring_cmd *command, unsigned int issue_flags)
{
	struct exmap *exmap = exmap_of(command->file);
	unsigned int index = command->cmd_op & 0xff;
	unsigned int opcode = command->cmd_op >> 8;
	const struct iovec *given = vellum_uring_cmd_data(command);
	struct iovec part = { READ_ONCE(given->iov_base), READ_ONCE(given->iov_len) };
	struct exmap_interface *interface = exmap_find_interface(exmap, index);
	long outcome;

	if (IS_ERR(interface))
		return PTR_ERR(interface);
	outcome = exmap_lock_interface(exmap, interface,
				       !(issue_flags & IO_URING_F_NONBLOCK));
	if (outcome)
		return outcome; /* after EAGAIN a worker calls again, and may wait */
	interface->published = true;
	if (command->flags & IORING_URING_CMD_FIXED)
		outcome = exmap_uring_buffer(exmap, index, opcode, command, part);
	else
		outcome = exmap_uring_range(exmap, index, opcode, part);
	mutex_unlock(&interface->lock);
	/*
	 * Completes the command here and not by the return value. 6.1 takes a positive return value
	 * for an error, and cancels the commands that are linked to this one. In a worker it takes
	 * the value for no completion at all.
	 */
	io_uring_cmd_done(command, outcome, 0, issue_flags);
	return -EIOCBQUEUED;
}
