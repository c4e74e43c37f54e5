// SPDX-License-Identifier: GPL-2.0
/* Mapping a Morsel by one entry in the process' page tables, and the operations on the mapping. */

#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/mman.h>
#include <linux/pfn_t.h>
#include <linux/pkeys.h>
#include <linux/slab.h>

#include "core/pt_pieces.h"
#include "core/pt_secondary.h"
#include "morsel/morsel.h"

/* A mapping of a process. It ends with its VMA. */
struct morsel_mount {
	struct pt_mount	mount;
	struct morsel	*morsel;
	bool		writes;		/* it counts as a writer */
};

static struct morsel_mount *morsel_mount_of(const struct vm_area_struct *vma)
{
	struct pt_mount *mount = vma->vm_private_data;

	return mount ? container_of(mount, struct morsel_mount, mount) : NULL;
}

static struct morsel *morsel_of_vma(const struct vm_area_struct *vma)
{
	return morsel_of(file_inode(vma->vm_file));
}

/*
 * Whether a mapping with these flags shows the reader's tree. A page without tables has an entry of
 * its own in each process.
 */
static bool morsel_needs_reader(const struct morsel *morsel, unsigned long flags)
{
	return !(flags & VM_WRITE) && morsel->order;
}

static struct morsel_mount *morsel_make_mount(struct morsel *morsel, struct mm_struct *process,
					      bool writes)
{
	struct morsel_mount *mount = kzalloc(sizeof(*mount), GFP_KERNEL_ACCOUNT);

	if (!mount)
		return NULL;
	pt_mount_init(&mount->mount, &morsel->tree);
	mount->mount.reader = morsel->reader;
	mount->morsel = morsel;
	mount->writes = writes;
	pt_mounts_add(&morsel->mounts, &mount->mount, process);
	return mount;
}

static void morsel_end_mount(struct morsel_mount *mount)
{
	pt_mounts_remove(&mount->morsel->mounts, &mount->mount);
	if (mount->writes)
		morsel_end_writing(mount->morsel);
	kfree(mount);
}

/* The outcome of a fault that could not bring the page. */
static vm_fault_t morsel_fault_of(int error)
{
	return error == -ENOMEM ? VM_FAULT_OOM : VM_FAULT_SIGBUS;
}

/*
 * The VMA flags that say what may take references to pages. VFIO takes pages without a reference
 * that it finds in a VM_PFNMAP if they are marked as reserved. The kernel's pages for persistent
 * memory are so marked, so their mapping must not be a VM_PFNMAP.
 */
static unsigned long morsel_pin_flags(const struct morsel *morsel)
{
	if (morsel->flags & VELLUM_MORSEL_PINNABLE)
		return VM_MIXEDMAP;
	return VM_IO | (morsel->device ? VM_MIXEDMAP : VM_PFNMAP);
}

static vm_fault_t morsel_insert_single(struct vm_fault *vmf, struct page *page)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long pfn = page_to_pfn(page);

	if (!(vma->vm_flags & VM_IO))
		return vmf_insert_page(vma, vmf->address, page);
	if (vma->vm_flags & VM_PFNMAP)
		return vmf_insert_pfn(vma, vmf->address, pfn);
	return vmf_insert_mixed(vma, vmf->address, __pfn_to_pfn_t(pfn, PFN_SPECIAL));
}

/*
 * Maps the page of order 0 by an entry of the process' own. The mutex is also held while the page
 * is taken off and such entries are cleared, so no entry can be made in between.
 */
static vm_fault_t morsel_map_single(struct vm_fault *vmf, struct morsel *morsel)
{
	vm_fault_t outcome = VM_FAULT_NOPAGE;
	pteval_t leaf;

	mutex_lock(&morsel->tables);
	leaf = READ_ONCE(morsel->tree.root[0]);
	if (morsel_is_shown(leaf))
		outcome = morsel_insert_single(vmf, pfn_to_page(pt_leaf_pfn(leaf)));
	mutex_unlock(&morsel->tables);
	return outcome;
}

static vm_fault_t morsel_vm_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct morsel_mount *mount = morsel_mount_of(vma);
	struct morsel *morsel = morsel_of_vma(vma);
	int error;

	/* A copy has no mount. Or no access is allowed, and the core still tries. */
	if (!mount || !vma_is_accessible(vma))
		return VM_FAULT_SIGSEGV;
	error = morsel_populate(morsel, vmf->pgoff);
	if (!error && morsel_needs_reader(morsel, vma->vm_flags))
		error = morsel_show_reader(morsel, vmf->pgoff);
	if (error)
		return morsel_fault_of(error);
	return morsel->order ? pt_mount_refault(&mount->mount, vmf) :
	       morsel_map_single(vmf, morsel);
}

/* Makes a child's mount, which its first access attaches. NULL: there is no memory for it. */
static struct morsel_mount *morsel_inherit(struct morsel_mount *parent, struct mm_struct *process)
{
	struct morsel_mount *child;
	bool writes = parent->writes;
	int error = writes ? morsel_begin_writing(parent->morsel) : 0;

	/* A revoked Morsel is lost to the child as it is to the parent. */
	if (error && error != -EIO)
		return NULL;
	writes &= !error;
	child = morsel_make_mount(parent->morsel, process, writes);
	if (!child && writes)
		morsel_end_writing(parent->morsel);
	return child;
}

/*
 * fork or mremap has copied the VMA, and the core is about to copy or to move what the page tables
 * hold: nothing. A fork that leaves the page tables alone need not disturb the parent.
 */
static void morsel_vm_open(struct vm_area_struct *vma)
{
	struct morsel_mount *mount = morsel_mount_of(vma), *child = NULL;
	bool is_child = vma->vm_mm != current->mm;

	if (!mount)
		return;
	if (!is_child || !(vma->vm_flags & VM_WIPEONFORK))
		pt_mount_detach(&mount->mount);
	if (is_child)
		child = morsel_inherit(mount, vma->vm_mm);
	vma->vm_private_data = child ? &child->mount : NULL;
}

static void morsel_vm_close(struct vm_area_struct *vma)
{
	struct morsel_mount *mount = morsel_mount_of(vma);

	if (!mount)
		return;
	pt_mount_vm_close(vma);
	morsel_end_mount(mount);
}

/* Makes the reader's tree if a mapping with these flags needs it. */
static int morsel_prepare_reader(struct morsel_mount *mount, unsigned long flags)
{
	int error;

	if (!morsel_needs_reader(mount->morsel, flags))
		return 0;
	error = morsel_make_reader(mount->morsel);
	mount->mount.reader = mount->morsel->reader;
	return error;
}

/*
 * Makes secondary MMUs forget the pages, which they have found with the old rights. An entry of the
 * process' own is removed, as the core would give it to a virtual machine even if no access is
 * allowed.
 */
static void morsel_tell_secondary(struct vm_area_struct *vma, struct morsel_mount *mount)
{
	if (mount->morsel->order && pt_secondary_can_be_told())
		pt_mount_tell(&mount->mount, vma->vm_mm, 0, mount->morsel->tree.pages);
	else
		unmap_mapping_range(vma->vm_file->f_mapping, 0, 0, 1);
}

/* The next access attaches the mount again, with the new rights. */
static int morsel_vm_mprotect(struct vm_area_struct *vma, unsigned long start, unsigned long end,
			      unsigned long flags)
{
	struct morsel_mount *mount = morsel_mount_of(vma);
	int error;

	if (start != vma->vm_start || end != vma->vm_end || !mount)
		return -EINVAL;
	/* The key would have to be in the leaves, which other processes share. */
	if (flags & ARCH_VM_PKEY_FLAGS)
		return -EOPNOTSUPP;
	error = morsel_prepare_reader(mount, flags);
	if (error)
		return error;
	pt_mount_detach(&mount->mount);
	morsel_tell_secondary(vma, mount);
	return 0;
}

/* Serves debuggers, which cannot pin pages of a Morsel. Copies within one page. */
static int morsel_vm_access(struct vm_area_struct *vma, unsigned long addr, void *buffer,
			    int length, int write)
{
	struct morsel *morsel = morsel_of_vma(vma);
	unsigned int offset = offset_in_page(addr);
	struct page *page;

	if (write && !(vma->vm_flags & VM_WRITE))
		return -EFAULT;
	page = morsel_get_page(morsel, (addr - vma->vm_start) >> PAGE_SHIFT);
	if (!page)
		return -EFAULT;
	length = min_t(int, length, PAGE_SIZE - offset);
	if (write)
		memcpy(page_address(page) + offset, buffer, length);
	else
		memcpy(buffer, page_address(page) + offset, length);
	put_page(page);
	return length;
}

static const struct vm_operations_struct morsel_vm_ops = {
	.open = morsel_vm_open,
	.close = morsel_vm_close,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = morsel_vm_mprotect,
	.fault = morsel_vm_fault,
	.access = morsel_vm_access,
};

static int morsel_check_mapping(const struct morsel *morsel, const struct vm_area_struct *vma)
{
	u64 extent;

	if (!morsel_is_shaped(morsel) || !(vma->vm_flags & VM_MAYSHARE) || vma->vm_pgoff)
		return -EINVAL;
	extent = VELLUM_MORSEL_EXTENT(morsel->order);
	if (vma->vm_end - vma->vm_start != extent || !IS_ALIGNED(vma->vm_start, extent))
		return -EINVAL;
	if (morsel->address && vma->vm_start != morsel->address)
		return -EINVAL;
	return vma->vm_flags & VM_EXEC ? -EACCES : 0;
}

/*
 * Counts a mapping through a descriptor for writing as a writer, also while it only reads. Such a
 * mapping of a sealed Morsel is for reading, for good.
 */
static int morsel_count_writer(struct morsel *morsel, struct vm_area_struct *vma, bool *writes)
{
	int error;

	*writes = vma->vm_flags & VM_MAYWRITE;
	if (!*writes)
		return READ_ONCE(morsel->is_revoked) ? -EIO : 0;
	error = morsel_begin_writing(morsel);
	if (error == -EPERM && !(vma->vm_flags & VM_WRITE)) {
		pt_vma_change_flags(vma, 0, VM_MAYWRITE);
		*writes = false;
		error = 0;
	}
	return error;
}

static int morsel_mount_create(struct morsel_mount *mount, struct vm_area_struct *vma)
{
	int error;

	if (!mount->morsel->order) {
		vma->vm_private_data = &mount->mount;
		return 0;
	}
	error = morsel_prepare_reader(mount, vma->vm_flags);
	return error ? error : pt_mount_create(&mount->mount, vma);
}

int morsel_map(struct file *file, struct vm_area_struct *vma)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	unsigned long flags = VM_DONTEXPAND | VM_DONTDUMP | VM_NOHUGEPAGE;
	struct morsel_mount *mount;
	bool writes;
	int error;

	error = morsel_check_mapping(morsel, vma);
	if (!error)
		error = morsel_count_writer(morsel, vma, &writes);
	if (error)
		return error;
	mount = morsel_make_mount(morsel, vma->vm_mm, writes);
	if (!mount) {
		if (writes)
			morsel_end_writing(morsel);
		return -ENOMEM;
	}
	flags |= morsel_pin_flags(morsel);
	flags |= morsel->flags & VELLUM_MORSEL_INHERIT ? VM_WIPEONFORK : VM_DONTCOPY;
	pt_vma_change_flags(vma, flags, VM_MAYEXEC);
	error = morsel_mount_create(mount, vma);
	if (error) {
		morsel_end_mount(mount);
		return error;
	}
	vma->vm_ops = &morsel_vm_ops;
	return 0;
}

/* The address that the Morsel is bound to, if nothing is in the way. The mmap lock is held. */
static unsigned long morsel_bound_area(u64 address, unsigned long addr, unsigned long len,
				       unsigned long flags)
{
	struct vm_area_struct *vma;

	if (flags & MAP_FIXED)
		return addr == address ? addr : -EINVAL;
	vma = find_vma(current->mm, address);
	return vma && vma->vm_start < address + len ? -EEXIST : address;
}

unsigned long morsel_area(struct file *file, unsigned long addr, unsigned long len,
			  unsigned long pgoff, unsigned long flags)
{
	struct morsel *morsel = morsel_of(file_inode(file));

	if (READ_ONCE(morsel->is_revoked))
		return -EIO;
	if (!morsel_is_shaped(morsel) || pgoff || len != VELLUM_MORSEL_EXTENT(morsel->order))
		return -EINVAL;
	if (morsel->address)
		return morsel_bound_area(morsel->address, addr, len, flags);
	if (!morsel->order)
		return pt_get_unmapped_area(file, addr, len, pgoff, flags);
	return pt_pieces_area(file, addr, len, pgoff, flags);
}
