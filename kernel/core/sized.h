/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Arguments of ioctls: structures that may grow at their ends. The first word of each is its size
 * as the caller knows it.
 *
 * An older program passes less than this module knows. The rest is zero, and the answer ends where
 * the program's structure ends. A newer program passes more. The rest must be zero, and stays zero.
 */
#ifndef VELLUM_SIZED_H
#define VELLUM_SIZED_H

#include <linux/ioctl.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/uaccess.h>

/* A command without its size field, which has the size of the caller's structure. */
#define vellum_sized_command(command)	((command) & ~(_IOC_SIZEMASK << _IOC_SIZESHIFT))

/*
 * Copies a structure in. `known` is its size in this module, `first` its size in the first version.
 * Returns the caller's size.
 *
 * Errors: EINVAL the structure is shorter than the first version; E2BIG it is longer than a page,
 * or has an unknown part that is not zero; EFAULT.
 */
static inline int vellum_copy_sized(void *to, size_t known, size_t first, unsigned long from)
{
	int error;
	u32 size;

	if (get_user(size, (u32 __user *)from))
		return -EFAULT;
	if (size < first)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	error = copy_struct_from_user(to, known, (void __user *)from, size);
	return error ? error : size;
}

/* Copies out as much of the structure as the caller knows. `size` is the caller's size. */
static inline int vellum_answer_sized(unsigned long to, int size, const void *from, size_t known)
{
	return copy_to_user((void __user *)to, from, min_t(size_t, size, known)) ? -EFAULT : 0;
}

#endif /* VELLUM_SIZED_H */
